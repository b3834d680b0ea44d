"""Untrusted values: JSON, what programs print instead, TOML, numbers. Their ranges are checked
here, so that they can be used as they are.

In JSON, integers with more than 40 digits, longer than identifiers, become strings; reals are
finite; nesting ends well below Python's recursion limit. Numbers have ranges by their meaning, so
that sums of several fit the columns of a trace and memory stays bounded.
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
"""Limits of a response or its drafts, and of either part of a prompt: their sum, a position, fits
COUNT."""
LONGEST_DRAFT = 1024
LARGEST = 2**53
"""float64 holds every integer up to this one."""
Count = Annotated[int, Meta(ge=0, le=COUNT)]
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
LONGEST_MS = 1e12
LONGEST_PART_MS = 1e11
"""Longest single time from a server or a file, 3 years: a sum of several fits LONGEST_MS."""
_REAL = re.compile(r"\d{1,20}(?:\.\d{0,20})?", re.ASCII)


class OutOfRangeError(ValueError):
    """A number out of range; the message is a clause about it."""


def whole(text: str, most: int = COUNT) -> int:
    """A decimal integer from 0 to `most`. Raises OutOfRangeError."""
    if not (text.isascii() and text.isdigit()):
        raise OutOfRangeError(f"{text[:40]!r} is not a whole number")
    digits = text.lstrip("0") or "0"
    if len(digits) > 20 or int(digits) > most:
        raise OutOfRangeError(f"{digits[:20]}{'…' * (len(digits) > 20)} is more than {most:,}")
    return int(digits)


def real(text: str, most: float = LONGEST_PART_MS) -> float:
    """A decimal number from 0 to `most`. Raises OutOfRangeError."""
    if _REAL.fullmatch(text) is None:
        raise OutOfRangeError(f"{text[:40]!r} is not a supported number")
    if (value := float(text)) > most:
        raise OutOfRangeError(f"{text[:40]} is more than {most:,.0f}")
    return value


def is_whole(value: Any, most: int = COUNT) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


@cache
def _whole_numbers(most: int) -> type[msgspec.Struct]:
    """A record of one such list: to hash the list's own type takes longer than most conversions."""
    field = ("values", list[Annotated[int, Meta(ge=0, le=most)]])
    return msgspec.defstruct("_Whole", [field], array_like=True)


def are_whole(values: Sequence[Any], most: int = COUNT) -> bool:
    """Whether all values are integers from 0 to `most`."""
    try:
        msgspec.convert((values,), _whole_numbers(most))
    except msgspec.ValidationError:
        return False
    return True


def is_real(value: Any, most: float = LONGEST_PART_MS) -> TypeGuard[int | float]:
    """Whether a value is a number from 0 to `most`; NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most


DEEPEST = 64
MOST_OBJECTS = 4_000_000
_MOST_DIGITS = 40
MOST_VALUES = 16_000_000
_SHORT = 1 << 12
"""Characters up to which speed does not matter."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """A text that is not JSON, or exceeds a limit. what: a clause. line, column: place, from 1."""

    def __init__(self, what: str, text: str = "", at: int = 0) -> None:
        self.what = what
        self.line = text.count("\n", 0, at) + 1
        self.column = at - text.rfind("\n", 0, at)
        super().__init__(f"line {self.line}, column {self.column}: {what}")


def parse_json(
    text: str, *, deepest: int = DEEPEST, unique: bool = False, whole_texts: bool = False
) -> Any:
    """The value of a text. unique: refuse duplicate keys, which costs some time. whole_texts:
    replace lone surrogates, which cannot be encoded.

    Raises JsonError for invalid JSON, including NaN and Infinity; for reals beyond float64, nesting
    deeper than `deepest`, and more than 4 million objects and lists or 16 million values.
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
    """The values of texts in which `parse_json` refuses and changes nothing; None if one is
    another, or if finding that out takes longer. A duplicate key shows when they are encoded again:
    there are fewer quotes. deepest: None if no text has more objects and lists than the nesting
    limit."""
    try:
        values = list(map(msgspec.json.decode, texts))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    data = msgspec.json.encode(values)
    is_deep = deepest is not None and (
        b"\n" + b" " * (deepest + 1) in msgspec.json.format(data, indent=1)
    )
    too_many = _MOST_DIGITS + 1  # of which every fifth byte shows a fifth
    is_long = b"0" * (too_many // 5) in data[::5].translate(_DIGITS)
    is_long = is_long and b"0" * too_many in data.translate(_DIGITS)
    is_whole = data.count(b'"') == sum(one.count('"') for one in texts)
    is_whole &= not any("\\" in one and "\\u0022" in one for one in texts)
    return None if is_deep or is_long or not is_whole else values


def quick_json(text: bytes | str, kind: Any = Any) -> Any:
    """The value of a text, unchecked; None if it is invalid or not of this type."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Uncounted(str):
    """A text whose JSON errors do not count lines: each would read all of the text before it."""

    def count(self, *_: Any) -> int:
        return 0

    rfind = count


def value_end(text: Uncounted, at: int) -> tuple[int, bool]:
    """The end of the value that begins at an offset of a text, and True; if it is incomplete, how
    far it was read, and False."""
    try:
        return int(_PLAIN.raw_decode(text, at)[1]), True
    except json.JSONDecodeError as error:
        return max(error.pos, at), False
    except RecursionError:
        return len(text), False


def closed_object(text: str) -> str:
    """A truncated object, cut after its last complete value and closed there; empty for any other
    text."""
    open_ones, whole, closing = list[str](), 0, ""
    for sign in _SIGN.finditer(text if text[:1] == "{" else ""):
        if (one := sign[0]) not in "{}[]":
            whole = sign.start() if one == "," else whole
            continue
        if one in "{[" and len(open_ones) < DEEPEST:
            open_ones.append("}" if one == "{" else "]")
        elif len(open_ones) < 2 or open_ones.pop() != one:
            return ""
        whole, closing = sign.end(), "".join(reversed(open_ones))
    return plain if quick_json(plain := text[:whole] + closing) is not None else ""


class _RefusedError(ValueError):
    """A refused part; args: why, and how it is written, empty for an object."""


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
    """Makes objects from their pairs, in the order of their ends. n: how many so far."""

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
_SIGN = re.compile(r'"(?:\\.|[^"\\])*+(?:"|\Z)|[][{},]')
"""Tokens of values: a string, which may be truncated, or punctuation."""
_PLAIN = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_END_OR_TEXT = re.compile(r'\}|"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _end_of_object(text: str, n: int) -> int:
    """The end of the n-th object to end."""
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
    """The value with lone surrogates in its strings replaced."""
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
    """The table of a TOML text. Raises ValueError or RecursionError for invalid TOML, and
    ValueError for more than MOST_PARTS words joined by dots, which only unreasonable keys have."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"more than {MOST_PARTS} words joined by points (at line {line})")
    return tomllib.loads(text)


_LITERAL = re.compile(
    r"\n(?:(?:\w{1,60} ?[:=] ?|[^\n{\"']{1,200}[\s=:(](?=\{'))?[\s\[{]{0,40}\{\s{0,200}"
    r"(?:[A-Za-z_$][\w$]{0,60}|'[^'\n]{1,60}')\s{0,3}:"
    r"|\s{0,40}(?:Out\[\d{1,9}\]: )?[A-Z]\w{0,60}\([a-z_]{1,60}=['\"\[{\w])"
)
"""The start of an object printed by JavaScript or Python, after a line break."""
_MEMBER = re.compile(
    r"\n[ \t]{0,40}((?:cache|draft|predicted|prompt)_\w{1,30}) {0,40}[:=] {0,9}"
    r"(?=[\d.]{1,20}\r?(?m:$))"
)
"""One member of timings, as printed by PowerShell or in a YAML file."""
_HASH = re.compile(r"@\{((?:\w{1,60}=[^;{}\n]{0,400}(?:; |(?=\}))){1,100})\}")
"""Members printed by PowerShell in one line."""
_PARTS_OF_TEXT = re.compile(r"(['\"`]) \+\n\s{0,200}\1")
_PRINTED = re.compile(
    r'("(?:[^"\\\n]|\\.)*+")|'
    r"'((?:[^'\\\n]|\\.)*+)'|`((?:[^`\\]|\\.)*+)`"
    r"|(?<![\w$])([A-Za-z_$][\w$]*+)\s{0,9}[:=]|([A-Z]\w{0,60}\(|\))"
    r"|\b(true|false|null)\b|\b(True|False)\b"
    r"|(\b(?:undefined|None|NaN)\b|\[(?:Object|Array|Circular[^\]\n]{0,9})\]|<ref[^>\n]{0,20}>)"
    r"|\.\.\. \d{1,9} more \w{1,12}|,(?=\s{0,200}[}\]])"
)
"""What is not JSON in such objects, and strings, which stay unchanged."""
_COMMENT = re.compile(
    r'("(?:[^"\\\n]|\\.)*+")|(?:(?m:^)|(?<=[\s,{\[}\]]))//[^\n]*|,(?=\s{0,200}[}\]])'
)
_MAY_BE_COMMENT = re.compile(r"//(?<![^\s,{\[}\]]//)|,(?=\s{0,200}[}\]])")
_PREFIXED = re.compile(r"\n([^\s\"{][^\n\"{]{0,119}[|:>\])] {1,3})[{\[]\r?(?=\n)")
"""The prefix of the first line of an object."""
_MOST_PREFIXES = 100
_QUOTED_OBJECT = re.compile(r"\n[ \t]{0,8}> ?\{")
_QUOTE = re.compile(r"(?m)^[ \t]{0,8}> ?(?=[\s\[\]{}\"`,]|\Z)")
"""The prefix of each line of a Markdown quote."""


def as_json(text: str) -> str:
    """Objects as printed by JavaScript, Python or PowerShell, quoted in Markdown or prefixed per
    line in a log, as JSON; any other text, and valid JSON, unchanged."""
    if quick_json(text, msgspec.Raw) is not None:
        return text
    text = "\n" + text.replace("\xa0", " ")  # so that each line follows a line break
    text = _MEMBER.sub(r'\n"\1": ', _unprefixed(text))
    if "//" in text and _MAY_BE_COMMENT.search(text) is not None:
        text = _COMMENT.sub(lambda found: found[1] or "", text)
    text = _HASH.sub(_of_hash, text)
    text = _QUOTE.sub("", text) if _QUOTED_OBJECT.search(text) is not None else text
    has_literals = _LITERAL.search(text) is not None
    return (_PRINTED.sub(_json_part, _PARTS_OF_TEXT.sub("", text)) if has_literals else text)[1:]


def _unprefixed(text: str) -> str:
    """A text without the prefixes of the lines of a multi-line object; they may differ in
    digits."""
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
    if bound:  # object of a class
        return "}" if bound == ")" else "{"
    return logical.lower() if logical else "null" if none else ""
