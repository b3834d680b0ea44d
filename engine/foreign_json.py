"""JSON from anyone: what it may hold is bounded here, so that its values can be used as they are.

Whole numbers have at most twenty digits and reals are finite; nesting ends long before Python's
own limit does; texts have whole characters only. Ranges by meaning are for those who read a key.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

DEEPEST = 64
MOST_OBJECTS = 4_000_000
_MOST_DIGITS = 20
_MOST_VALUES = 32_000_000
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """A text that is no JSON, or more than is read. what: a clause such as "a key is missing".
    line, column: where, from 1."""

    def __init__(self, what: str, text: str = "", at: int = 0) -> None:
        self.what = what
        self.line = text.count("\n", 0, at) + 1
        self.column = at - text.rfind("\n", 0, at)
        super().__init__(f"line {self.line}, column {self.column}: {what}")


def parse_json(text: str, *, deepest: int = DEEPEST, unique: bool = False) -> Any:
    """The value of a text. unique: an object may not have a key twice, which costs some time.

    Raises JsonError for what is no JSON: NaN and Infinity are none; and for whole numbers of more
    than 20 digits, reals beyond float64, nesting deeper than `deepest`, and more than 4 million
    objects and lists or 32 million values.
    """
    n_inside = text.count("{") + text.count("[")
    if n_inside > MOST_OBJECTS or text.count(",") > _MOST_VALUES:
        raise JsonError("more values than are read")
    try:
        value = (_UNIQUE if unique else _DECODER).decode(text)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, text, error.pos) from None
    except RecursionError:
        raise JsonError(f"nested more than {deepest} times") from None
    except _RefusedError as refused:
        what, literal = refused.args
        raise JsonError(what, text, max(text.find(literal), 0)) from None
    if n_inside > deepest and _is_deeper(value, deepest):
        raise JsonError(f"nested more than {deepest} times")
    return _whole(value) if _HALF.search(text) else value


class _RefusedError(ValueError):
    """A part that is not read; args: why, and how it is written."""


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise _RefusedError(f"a number of {len(text):,} digits", text)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {text[:40]}, which is beyond all range", text)
    return value


def _constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text}, which is no number", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _RefusedError(f"the key {key[:40]!r} twice in one object", json.dumps(key))
    return found


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_real, parse_constant=_constant)
_UNIQUE = json.JSONDecoder(
    parse_int=_integer, parse_float=_real, parse_constant=_constant, object_pairs_hook=_object
)


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
    """The value with its texts free of halves of characters, which cannot be written."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(one) for key, one in value.items()}
    return value
