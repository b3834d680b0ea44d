"""Values from anyone: JSON, what programs print instead, TOML, numbers. What they may hold is
bounded here, so that it can be used as it is.

Of JSON, whole numbers of more than 40 digits, more than identifiers have, become texts; reals are
finite; nesting ends long before Python's own limit does. Numbers have ranges by what they mean, so
that sums of some of them fit the columns of a trace and nothing takes memory without bounds.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, NoReturn, TypeGuard

import msgspec
from msgspec import Meta

COUNT = 2**31 - 1
MOST_TOKENS, MOST_PROMPT_TOKENS = 2**30 - 1, 2**29
"""Of an answer or its drafts, and of either part of a prompt: a position, their sum, fits COUNT."""
LONGEST_DRAFT = 1024
LARGEST = 2**53
"""Up to here float64 has every whole number."""
Count = Annotated[int, Meta(ge=0, le=COUNT)]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
LONGEST_MS = 1e12
LONGEST_PART_MS = 1e11
"""Of one time that a server or a file tells, 3 years: a sum of several fits LONGEST_MS."""
_REAL = re.compile(r"\d{1,20}(?:\.\d{0,20})?", re.ASCII)


class OutOfRangeError(ValueError):
    """A number that cannot be; the message is a clause about it."""


def whole(text: str, most: int = COUNT) -> int:
    """A number of decimal digits, from 0 to `most`. Raises OutOfRangeError."""
    if not (text.isascii() and text.isdigit()):
        raise OutOfRangeError(f"{text[:40]!r} is not a whole number")
    digits = text.lstrip("0") or "0"
    if len(digits) > 20 or int(digits) > most:
        raise OutOfRangeError(f"{digits[:20]}{'…' * (len(digits) > 20)} is more than {most:,}")
    return int(digits)


def real(text: str, most: float = LONGEST_PART_MS) -> float:
    """A decimal number from 0 to `most`. Raises OutOfRangeError."""
    if _REAL.fullmatch(text) is None:
        raise OutOfRangeError(f"{text[:40]!r} is not a number that is read")
    if (value := float(text)) > most:
        raise OutOfRangeError(f"{text[:40]} is more than {most:,.0f}")
    return value


def is_whole(value: Any, most: int = COUNT) -> TypeGuard[int]:
    """Whether a value is a whole number from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


_whole_numbers = cache(lambda most: list[Annotated[int, Meta(ge=0, le=most)]])


def are_whole(values: Sequence[Any], most: int = COUNT) -> bool:
    """Whether all of several values are."""
    try:
        msgspec.convert(values, _whole_numbers(most))
    except msgspec.ValidationError:
        return False
    return True


def is_real(value: Any, most: float = LONGEST_PART_MS) -> TypeGuard[int | float]:
    """Whether a value is a number from 0 to `most`; no NaN is."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


DEEPEST = 64
MOST_OBJECTS = 4_000_000
_MOST_DIGITS = 40
MOST_VALUES = 16_000_000
_SHORT = 1 << 12
"""Characters up to which there is no need for speed."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """A text that is not JSON, or more than is read. what: a clause. line, column: where, from
    1."""

    def __init__(self, what: str, text: str = "", at: int = 0) -> None:
        self.what = what
        self.line = text.count("\n", 0, at) + 1
        self.column = at - text.rfind("\n", 0, at)
        super().__init__(f"line {self.line}, column {self.column}: {what}")


def parse_json(
    text: str, *, deepest: int = DEEPEST, unique: bool = False, whole_texts: bool = False
) -> Any:
    """The value of a text. unique: an object may not have a key twice, which costs some time.
    whole_texts: halves of characters, which cannot be written, are replaced.

    Raises JsonError for what is not JSON, as NaN and Infinity are; for reals beyond float64,
    nesting deeper than `deepest`, and more than 4 million objects and lists or 16 million values.
    """
    n_inside = text.count("{") + text.count("[")
    if n_inside > MOST_OBJECTS:
        raise JsonError(f"it has more than {MOST_OBJECTS:,} objects and lists")
    if text.count(",") > MOST_VALUES:
        raise JsonError(f"it has more than {MOST_VALUES:,} values")
    most = deepest if n_inside > deepest else None
    if len(text) > _SHORT and (plain := plain_values([text], most)) is not None:
        return plain[0]
    objects = _UniqueKeys() if unique else None
    decoder = _DECODER if objects is None else json.JSONDecoder(object_pairs_hook=objects, **_HOOKS)
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, text, error.pos) from None
    except RecursionError:
        raise JsonError(f"it is nested more than {deepest} times") from None
    except _RefusedError as refused:
        what, literal = refused.args
        at = max(text.find(literal), 0)
        if objects is not None and not literal:
            at = _end_of_object(text, objects.n)
        raise JsonError(what, text, at) from None
    if n_inside > deepest and _is_deeper(value, deepest):
        raise JsonError(f"it is nested more than {deepest} times")
    return _whole(value) if whole_texts and _HALF.search(text) else value


def plain_values(texts: Sequence[str], deepest: int | None = None) -> list[Any] | None:
    """The values of texts with nothing that `parse_json` refuses or changes; None if one is
    another, or where that takes more to see. Written again they have fewer quotes if a key was
    there twice. deepest: None where none has more objects and lists than may lie in each other."""
    try:
        values = list(map(msgspec.json.decode, texts))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    data = msgspec.json.encode(values)
    is_deep = deepest is not None and (
        b"\n" + b" " * (deepest + 1) in msgspec.json.format(data, indent=1)
    )
    is_long = b"0" * (_MOST_DIGITS + 1) in data.translate(_DIGITS)
    is_whole = data.count(b'"') == sum(one.count('"') for one in texts)
    is_whole &= not any("\\" in one and "\\u0022" in one for one in texts)
    return None if is_deep or is_long or not is_whole else values


def quick_json(text: bytes | str, kind: Any = Any) -> Any:
    """The value of a text, whatever it has; None of what is none of this type."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Uncounted(str):
    """A text in whose errors no line is counted, for which each reads all before its place."""

    def count(self, *_: Any) -> int:
        return 0

    rfind = count


def value_end(text: Uncounted, at: int) -> tuple[int, bool]:
    """Where the value that begins at a place of a text ends, and True; else how far it was read,
    and False."""
    try:
        return int(_PLAIN.raw_decode(text, at)[1]), True
    except json.JSONDecodeError as error:
        return max(error.pos, at), False
    except RecursionError:
        return len(text), False


class _RefusedError(ValueError):
    """A part that is not read; args: why, and how it is written, empty of an object."""


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"{text[:40]} is beyond the range of numbers", text)
    return value


def _constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not a number", text)


class _UniqueKeys:
    """Makes objects of their pairs, in the order of their ends. n: how many so far."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        self.n += 1
        if len(found) != len(pairs):
            key = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            raise _RefusedError(f"the key {key[:40]!r} is twice in the object that ends here", "")
        return found


_HOOKS: dict[str, Any] = {"parse_int": _integer, "parse_float": _real, "parse_constant": _constant}
_DECODER = json.JSONDecoder(**_HOOKS)
_PLAIN = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_END_OR_TEXT = re.compile(r'\}|"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _end_of_object(text: str, n: int) -> int:
    """Where the n-th object to end does so."""
    ends = (found.start() for found in _END_OR_TEXT.finditer(text) if found[0] == "}")
    return next(islice(ends, n - 1, None), 0)


def _is_deeper(value: Any, deepest: int) -> bool:
    level = [value]
    for _ in range(deepest):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _whole(value: Any) -> Any:
    """The value with its texts free of halves of characters."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(one) for key, one in value.items()}
    return value


MOST_PARTS = 64
_PART = r"""(?:[\w-]++|"[^"\n]{0,40}+"|'[^'\n]{0,40}+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}\s*+\.\s*+){{{MOST_PARTS}}}", re.ASCII)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a text. Raises ValueError or RecursionError for what is not TOML, and ValueError
    for a text of more than MOST_PARTS words joined by points, as only a key out of range has."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"more than {MOST_PARTS} words joined by points (at line {line})")
    return tomllib.loads(text)


_LITERAL = re.compile(
    r"\n(?:(?:\w{1,60} ?[:=] ?|[^\n{\"']{1,200}[\s=:(](?=\{'))?[\s\[{]{0,40}\{\s{0,200}"
    r"(?:[A-Za-z_$][\w$]{0,60}|'[^'\n]{1,60}')\s{0,3}:"
    r"|\s{0,40}(?:Out\[\d{1,9}\]: )?[A-Z]\w{0,60}\([a-z_]{1,60}=['\"\[{\w])"
)
"""How an object begins that JavaScript or Python has printed, after the end of a line."""
_MEMBER = re.compile(
    r"\n[ \t]{0,40}((?:cache|draft|predicted|prompt)_\w{1,30}) {0,40}[:=] {0,9}"
    r"(?=[\d.]{1,20}\r?(?m:$))"
)
"""A member of timings by itself, as PowerShell shows it, or a file of YAML."""
_HASH = re.compile(r"@\{((?:\w{1,60}=[^;{}\n]{0,400}(?:; |(?=\}))){1,100})\}")
"""Members that PowerShell shows in one line."""
_PARTS_OF_TEXT = re.compile(r"(['\"`]) \+\n\s{0,200}\1")
_PRINTED = re.compile(
    r'("(?:[^"\\\n]|\\.)*+")|'
    r"'((?:[^'\\\n]|\\.)*+)'|`((?:[^`\\]|\\.)*+)`"
    r"|(?<![\w$])([A-Za-z_$][\w$]*+)\s{0,9}[:=]|([A-Z]\w{0,60}\(|\))"
    r"|\b(true|false|null)\b|\b(True|False)\b"
    r"|(\b(?:undefined|None|NaN)\b|\[(?:Object|Array|Circular[^\]\n]{0,9})\]|<ref[^>\n]{0,20}>)"
    r"|\.\.\. \d{1,9} more \w{1,12}|,(?=\s{0,200}[}\]])"
)
"""What is not JSON in such objects, and the texts in which nothing is to be changed."""
_COMMENT = re.compile(
    r'("(?:[^"\\\n]|\\.)*+")|(?:(?m:^)|(?<=[\s,{\[}\]]))//[^\n]*|,(?=\s{0,200}[}\]])'
)
_MAY_BE_COMMENT = re.compile(r"//(?<![^\s,{\[}\]]//)|,(?=\s{0,200}[}\]])")
_PREFIXED = re.compile(r"\n([^\s\"{][^\n\"{]{0,119}[|:>\])] {1,3})[{\[]\r?(?=\n)")
"""What is before the first line of an object."""
_MOST_PREFIXES = 100
_QUOTED_OBJECT = re.compile(r"\n[ \t]{0,8}> ?\{")
_QUOTE = re.compile(r"(?m)^[ \t]{0,8}> ?(?=[\s\[\]{}\"`,]|\Z)")
"""Before each line of a text that Markdown quotes."""


def as_json(text: str) -> str:
    """Objects as JavaScript, Python or PowerShell print them, Markdown quotes them or a log has
    them, a prefix before each line, as JSON; any other text, and what is JSON, as it is."""
    if quick_json(text, msgspec.Raw) is not None:
        return text
    text = "\n" + text.replace("\xa0", " ")  # so that each line is after the end of one
    text = _MEMBER.sub(r'\n"\1": ', _unprefixed(text))
    if "//" in text and _MAY_BE_COMMENT.search(text) is not None:
        text = _COMMENT.sub(lambda found: found[1] or "", text)
    text = _HASH.sub(_of_hash, text)
    text = _QUOTE.sub("", text) if _QUOTED_OBJECT.search(text) is not None else text
    has_literals = _LITERAL.search(text) is not None
    return (_PRINTED.sub(_json_part, _PARTS_OF_TEXT.sub("", text)) if has_literals else text)[1:]


def _unprefixed(text: str) -> str:
    """A text without what its lines have before an object that goes on over them, but for digits
    the same in each."""
    for first in islice(_PREFIXED.finditer(text), _MOST_PREFIXES):
        prefix = re.sub(r"\d+", lambda _: r"\d{1,20}", re.escape(first[1]))
        lines = re.compile(rf"(?:{prefix}[^\n]*\n){{2}}")
        if lines.match(text, first.start(1)) is not None:
            return re.sub(rf"(?m)^{prefix}", "", text)
    return text


def _of_hash(found: re.Match[str]) -> str:
    members = (one.partition("=") for one in found[1].split("; "))
    shown = (
        f'"{name}": {value if re.fullmatch(r"[0-9]+(?:[.][0-9]+)?", value) else json.dumps(value)}'
        for name, _, value in members
    )
    return "{" + ", ".join(shown) + "}"


def _json_part(found: re.Match[str]) -> str:
    double, single, several, key, bound, same, logical, none = found.groups()
    if double or same:
        return double or same
    if (quoted := single if several is None else several) is not None:
        quoted = quoted.replace("\n", "\\n").replace('"', '\\"').replace('\\\\"', '\\"')
        quoted = quoted.replace("\\'", "'").replace("\\`", "`")
        return '"' + re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", quoted) + '"'
    if key:
        return f'"{key}":'
    if bound:  # of an object of a class
        return "}" if bound == ")" else "{"
    return logical.lower() if logical else "null" if none else ""
