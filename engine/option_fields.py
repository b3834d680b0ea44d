"""Option fields: dataclass fields that describe themselves.

A field carries its command-line flag, its help, its allowed values and its row in a form. Argparse
arguments, form rows and checks are made from that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, TypeVar, get_args, get_type_hints

from engine.errors import OptionError

_T = TypeVar("_T")
_FOUND: dict[type, tuple[PlacedOption, ...]] = {}
_HINTS: dict[type, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A range of numbers, and the remedy for one out of range. is_open: `low` is excluded. Reals
    show as an interval."""

    low: float
    high: float
    remedy: str
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range; NaN never does."""
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def broken(self) -> str:
        """What to say of a number out of range, such as "is negative"."""
        if self.high == math.inf:
            return "is not positive" if self.is_open else _below(self.low)
        if isinstance(self.low, float):
            return f"is outside {'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"
        return f"is outside {self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class FormRow:
    """An option's row in a form.

    label: before the field, or next to a tick. low, high: of a number field. special: text for the
    lowest number, which stands for None if the default is None. start: initial value if not the
    default. text: placeholder of an empty line. short: the option's name among several in one row.
    """

    label: str
    low: float = 0
    high: float = 0
    special: str = ""
    start: float | None = None
    text: str = ""
    short: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Words in braces are filled in: {choices} and {either} list the choices, others
    come from the `part` that holds the option.

    flags: short and long; errors use the first one unless `named` is given. group: its section on
    the command line and in forms; empty: the GROUP of its dataclass. parse: converts the text of
    one value, raises OptionError. repeats: the flag is given once per value.
    """

    flags: tuple[str, ...]
    help: str
    within: NumberRange | None = None
    row: FormRow | None = None
    group: str = ""
    choices: Collection[str] = ()
    metavar: str = "N"
    parse: Callable[[str], Any] | None = None
    repeats: bool = False
    named: str = ""

    @property
    def name(self) -> str:
        """The flag that errors name."""
        return self.named or self.flags[0]

    @property
    def dest(self) -> str:
        """The argparse name of the value."""
        long = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        return long.lstrip("-").replace("-", "_")

    @property
    def about(self) -> str:
        """`help` with the current choices, to which some may have been added."""
        names = tuple(self.choices)
        return self.help.format(choices=", ".join(names), either=" or ".join(names))

    @property
    def meanings(self) -> dict[str, str]:
        """The choices, each with its explanation or an empty text."""
        if not isinstance(self.choices, Mapping):
            return dict.fromkeys(self.choices, "")
        return {name: str(getattr(one, "about", one)) for name, one in self.choices.items()}

    def check(self, value: Any) -> None:
        """Raise OptionError for a value that is not allowed; None always is."""
        if value is None:
            return
        if self.within and not self.within.holds(value):
            raise OptionError(f"{self.name} {self.within.broken()}.", self.within.remedy)
        if self.choices:
            for name in (value,) if isinstance(value, str) else value:
                if name not in self.choices:
                    names = ("none",) * (self.parse is not None) + (*self.choices,)
                    parts = {*str(name).lower().replace("_", "-").split("-")}
                    near = [one for one in names if parts <= {*one.split("-")}]
                    raise OptionError(
                        f"{self.name} {name} is unknown.",
                        f"Choose from {', '.join(near or names)}.",
                    )


@dataclass(frozen=True, slots=True)
class PlacedOption:
    """An option with its place. path: names of fields from the outermost dataclass to its own.
    kind: int, float, str, bool or tuple."""

    path: tuple[str, ...]
    option: Option
    kind: type
    default: Any

    def value(self, options: Any) -> Any:
        """Its value in these options, an instance of the outermost dataclass."""
        return reduce(getattr, self.path, options)

    @property
    def field(self) -> str:
        """The last name of the path."""
        return self.path[-1]

    @property
    def row(self) -> FormRow:
        """Its row in a form; only for options that have one."""
        assert self.option.row is not None
        return self.option.row


def option(default: Any, line: str, *shown: NumberRange | FormRow, **others: Any) -> Any:
    """A dataclass field with this default that is an option. line: flags, placeholder of the value
    and help, as the command line shows them: `-n, --number N  how many`; without a placeholder it
    is N. shown: the range, the row, or both. others: see Option."""
    for one in shown:
        others["within" if isinstance(one, NumberRange) else "row"] = one
    names, _, about = line.partition("  ")
    *flags, last = names.split(", ")
    flag, _, metavar = last.partition(" ")
    found = Option((*flags, flag), about, metavar=metavar or "N", **others)
    return field(default=default, metadata={"option": found})


def json_object(text: str) -> dict[str, Any]:
    """The value of an option that is a JSON object. Raises OptionError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"{text[:80]!r} is not a JSON object.", "Write it like '{\"n\": 4}'.")
    return value


def part(kind: type, *, without: Collection[str] = (), **words: str) -> Any:
    """A field that holds options of its own. words: for the braces in their texts. without: fields
    without a row in forms."""
    return field(default_factory=kind, metadata={"words": words, "without": tuple(without)})


def options_in(kind: type) -> tuple[PlacedOption, ...]:
    """All options of a dataclass and of its parts, in the order of its fields."""
    if kind not in _FOUND:
        _FOUND[kind] = tuple(_options_in(kind))
    return _FOUND[kind]


def grouped(kind: type, *groups: str) -> list[PlacedOption]:
    """The options of these groups, in the order of the fields."""
    return [one for one in options_in(kind) if one.option.group in groups]


def check(options: Any) -> None:
    """Raise OptionError for the first value that is not allowed, in parts too."""
    for one in options_in(type(options)):
        one.option.check(one.value(options))


def differing(options: Any) -> Iterator[tuple[PlacedOption, Any]]:
    """Options that differ from their defaults, with their values; invalid values are skipped."""
    for one in options_in(type(options)) if options else ():
        value = one.value(options)
        if value is None or value == one.default:
            continue
        try:
            one.option.check(value)
        except OptionError:
            continue
        yield one, value


def words_of(options: Any) -> list[str]:
    """The options that differ from their defaults, as command-line arguments."""
    words: list[str] = []
    for one, value in differing(options):
        flag = one.option.flags[0]
        if one.kind is bool:
            words.append(flag)
        elif one.option.repeats:
            words += [word for each in value for word in (flag, _repeated(each))]
        else:
            words += [flag, _word(value)]
    return words


def build(kind: type[_T], values: Mapping[tuple[str, ...], Any]) -> _T:
    """The dataclass with these values by path, and defaults elsewhere. Raises OptionError."""
    own: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    hints = _hints(kind)
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        own[name] = build(hints[name], inner)
    return kind(**own)


def _hints(kind: type) -> dict[str, Any]:
    """Types of the fields, cached: a form asks at every keystroke."""
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _options_in(kind: type) -> Iterator[PlacedOption]:
    hints = _hints(kind)
    for one in fields(kind):
        if (found := one.metadata.get("option")) is not None:
            plain = [k for k in get_args(hints[one.name]) if k is not type(None)]
            is_tuple = getattr(hints[one.name], "__origin__", None) is tuple
            what = tuple if is_tuple else plain[0] if plain else hints[one.name]
            found = replace(found, group=found.group or getattr(kind, "GROUP", ""))
            yield PlacedOption((one.name,), found, what, one.default)
        elif "words" in one.metadata:
            for inner in options_in(hints[one.name]):
                yield _within_part(inner, one.name, one.metadata)


def _within_part(inner: PlacedOption, name: str, metadata: Mapping[str, Any]) -> PlacedOption:
    words, found = _BraceWords(metadata["words"]), inner.option
    found = replace(
        found,
        flags=tuple(flag.format_map(words) for flag in found.flags),
        help=found.help.format_map(words),
        row=None if inner.field in metadata["without"] else found.row,
    )
    return replace(inner, path=(name, *inner.path), option=found)


class _BraceWords(dict[str, str]):
    """Words for the braces of a text; a brace without a word stays."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def plain_value(one: PlacedOption, value: Any) -> Any:
    """The value as it is written in files: a text, number or flag, or a list of texts."""
    if one.option.repeats:
        return [_repeated(each) for each in value]
    return value if one.kind in (int, float, bool) else _word(value)


def _repeated(each: Any) -> str:
    """One value of a repeated option; a bias is its token and a signed number."""
    if isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[1], (int, float)):
        return f"{each[0]}{each[1]:+g}"
    return _word(each)


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_word, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _below(low: float) -> str:
    return "is negative" if low == 0 else f"is below {low}"
