"""Small Python programs that are not one function, with a test."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import Template


@dataclass(frozen=True, slots=True)
class ProgramFamily:
    """Programs of one kind, with slots as in `FunctionFamily`; `$c` is a class, `$v` an object."""

    names: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    text: str


_ITEMS = {"field": ("_items", "_values", "_data", "_elements"), "x": ("item", "value", "element")}

PROGRAMS = (
    ProgramFamily(
        ("Stack", "Pile", "History"),
        _ITEMS,
        '''
class $c:
    def __init__(self):
        self.$field = []

    def push(self, $x):
        """Put $x on top."""
        self.$field.append($x)

    def pop(self):
        """Return the top $x and take it off."""
        if not self.$field:
            raise IndexError("the $v is empty")
        return self.$field.pop()


def test_$v():
    $v = $c()
    $v.push($m)
    $v.push($n)
    assert $v.pop() == $n
''',
    ),
    ProgramFamily(
        ("Queue", "Line", "Inbox"),
        _ITEMS,
        '''
class $c:
    def __init__(self):
        self.$field = []

    def put(self, $x):
        """Add $x at the end."""
        self.$field.append($x)

    def get(self):
        """Return the first $x and take it out."""
        if not self.$field:
            raise IndexError("the $v is empty")
        return self.$field.pop(0)


def test_$v():
    $v = $c()
    $v.put($m)
    $v.put($n)
    assert $v.get() == $m
''',
    ),
    ProgramFamily(
        ("Counter", "Tally", "Score"),
        {"field": ("count", "number", "total"), "x": ("step", "amount", "by")},
        '''
class $c:
    def __init__(self):
        self.$field = 0

    def add(self, $x=1):
        """Raise the $field by $x."""
        self.$field += $x
        return self.$field

    def reset(self):
        """Begin again at zero."""
        self.$field = 0


def test_$v():
    $v = $c()
    $v.add($n)
    assert $v.$field == $n
    $v.reset()
    assert $v.$field == 0
''',
    ),
    ProgramFamily(
        ("Node", "Link", "Cell"),
        {
            "x": ("value", "item", "data"),
            "next": ("next", "tail", "rest"),
            "f": ("to_list", "values_of", "walk"),
            "found": ("found", "result", "values"),
        },
        '''
class $c:
    def __init__(self, $x, $next=None):
        self.$x = $x
        self.$next = $next


def $f($v):
    """Return what lies from $v to the end."""
    $found = []
    while $v is not None:
        $found.append($v.$x)
        $v = $v.$next
    return $found


def test_$f():
    $v = $c($m, $c($n))
    assert $f($v) == [$m, $n]
''',
    ),
    ProgramFamily(
        ("File",),
        {
            "gap": ("\n", "\n\n"),
            "f": ("read_file", "load_text", "text_of"),
            "x": ("path", "name", "filename"),
            "file": ("file", "f", "handle"),
        },
        '''
import os
${gap}def $f($x):
    """Return the text of a file, or None if there is none."""
    if not os.path.exists($x):
        return None
    with open($x, encoding="utf-8") as $file:
        return $file.read()


def test_$f():
    assert $f("missing$n.txt") is None
''',
    ),
)


def program(family: ProgramFamily, rng: Random) -> str:
    """A program of the family with its test."""
    slots = {key: rng.choice(pool) for key, pool in family.slots.items()}
    m, n = rng.sample(range(1, 10), 2)
    name = rng.choice(family.names)
    slots.update(c=name, v=name.lower(), m=str(m), n=str(n))
    return Template(family.text.lstrip("\n")).substitute(slots)
