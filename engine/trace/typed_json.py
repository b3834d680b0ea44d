"""Typed JSON from untrusted sources: read as far as possible, or checked with the place of each
error.

Types are annotations, msgspec's limits included; records are msgspec.Struct and dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
from msgspec import Meta, Struct

from engine.foreign import COUNT

_T = TypeVar("_T")
LONGEST = 1 << 16
"""Characters of a text, entries of a list."""

Lenient = Annotated[_T, Meta(extra={"lenient": True})]
"""Marks a type that never causes an error in a file: unreadable values count as unknown."""


def strict_json(value: Any) -> Any:
    """A value for strict JSON, which has no NaN or infinity: they become None, tuples lists."""
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def strictly(hint: Any, value: Any, error: Callable[[str, str], Exception]) -> Any:
    """Convert a value with msgspec. error: makes the exception from the place in the value, empty
    for all of it, and the message."""
    try:
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, OverflowError) as found:
        what, _, place = str(found).partition(" - at `$")
        raise error(place.strip("`."), f"is wrong: {what[:1].lower()}{what[1:]}") from found


def read_or(hint: Any, value: Any, default: Any) -> Any:
    """A value of a type, or the default if it cannot be read."""
    try:
        return _read(hint, value)
    except (msgspec.ValidationError, OverflowError):
        return default


def _read(hint: Any, value: Any) -> Any:
    """A value of a type without unreadable list entries; unreadable fields get their defaults.
    Raises msgspec.ValidationError."""
    hint, or_null = _core(hint)
    if type(value) is hint or (value is None and or_null):
        return value
    if not hasattr(hint, "__post_init__"):  # a record without checks of its own
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError:
            value = strict_json(value)
    origin, args = _parts(hint)
    if origin is list and isinstance(value, list):
        entries = (read_or(args[0], one, MISSING) for one in value)
        return [one for one in entries if one is not MISSING]
    if _is_record(hint) and isinstance(value, dict):
        return _read_record(hint, value)
    return msgspec.convert(value, hint)


def _read_record(kind: type, value: dict[str, Any]) -> Any:
    """Read a Struct, or a dataclass without checks of its own, field by field."""
    known = {}
    for name, hint, default in _fields(kind):
        found = read_or(hint, value[name], MISSING) if name in value else MISSING
        if found is MISSING:
            if default is None:
                raise msgspec.ValidationError(f"{name} is missing")
            found = default()
        known[name] = found
    if issubclass(kind, Struct):
        return kind(**known)
    record = object.__new__(kind)
    for name, found in known.items():
        object.__setattr__(record, name, found)
    return record


def _core(hint: Any) -> tuple[Any, bool]:
    """A type without this module's own markers and without null; whether it allowed null."""
    origin, args = _parts(hint)
    if origin is Annotated and args[1].extra:
        return _core(args[0])
    if origin in (Union, UnionType):
        (hint,) = (one for one in args if one is not NoneType)
        return hint, True
    return hint, False


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, Struct) or is_dataclass(hint))


@cache
def _fields(kind: type) -> list[tuple[str, Any, Callable[[], Any] | None]]:
    """Names and types of a record's fields, and their default factories."""
    hints = get_type_hints(kind, include_extras=True)
    found: Sequence[Any] = (
        msgspec.structs.fields(kind) if issubclass(kind, Struct) else fields(cast(Any, kind))
    )
    return [(one.name, hints[one.name], _default_of(one)) for one in found]


def _default_of(one: Any) -> Callable[[], Any] | None:
    absent = (MISSING, msgspec.NODEFAULT)
    if one.default_factory not in absent:
        return one.default_factory
    return None if one.default in absent else lambda: one.default


# -- checking ----------------------------------------------------------------------------------


def wrong(hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """The places where a value does not match a type, and how."""
    if hint is Any:
        return
    limits: list[Any] = []
    origin, args = _parts(hint)
    if origin is Annotated:
        hint, *limits = args
        extra = limits[0].extra or {}
        if "lenient" in extra:
            return
        hint = extra.get("form", hint)
        origin, args = _parts(hint)
    if origin in (Union, UnionType):
        if value is not None:
            for place, problem in wrong(args[0], value):
                yield place, f"{problem}, or null"
    elif hint in (int, float):
        yield from _wrong_number(hint, value, *limits)
    elif origin is Literal:
        if value not in args:
            yield "", not_a(value, f"one of {', '.join(args)}")
    elif hint is bool:
        if not isinstance(value, bool):
            yield "", not_a(value, "true or false")
    elif origin in (list, tuple):
        yield from _wrong_entries(args, value)
    elif hint is not str and (origin is dict or _is_record(hint)):
        yield from _wrong_object(hint, value)
    elif not isinstance(value, str) or len(value) > LONGEST:
        yield "", not_a(value, f"a text of at most {LONGEST:,} characters")


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of a type, which cost more than checking most values."""
    found = _PARTS.get(id(hint))
    if found is None:
        found = _PARTS[id(hint)] = hint, get_origin(hint), get_args(hint)
    return found[1:]


_PARTS: dict[int, tuple[Any, Any, tuple[Any, ...]]] = {}
"""Keyed by id(type), because hashing a type costs as much as taking it apart; the reference keeps
the id unique."""


def _wrong_number(kind: type, value: Any, *limits: Any) -> Iterator[tuple[str, str]]:
    least, most = (-1, COUNT) if kind is int else (-math.inf, math.inf)
    if limits:
        least, most = limits[0].ge, math.inf if limits[0].le is None else limits[0].le
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not (fits and least <= value <= most):
        upto = f" to {most:,}" if math.isfinite(most) else ""
        bounds = f" from {least:,}{upto}" if math.isfinite(least) else ""
        yield "", not_a(value, f"a {'whole ' if kind is int else ''}number{bounds}")


def _wrong_entries(of: tuple[Any, ...], value: Any) -> Iterator[tuple[str, str]]:
    """of: the type of each entry, or one for all."""
    if not isinstance(value, list) or len(value) > LONGEST:
        yield "", not_a(value, f"a list of at most {LONGEST:,} entries")
        return
    is_pair = len(of) == 2 and of[1] is not ...
    if is_pair and len(value) != 2:
        yield "", not_a(value, "a list of two")
        return
    for i, one in enumerate(value):
        yield from within(str(i), wrong(of[i] if is_pair else of[0], one))


def _wrong_object(kind: Any, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield "", not_a(value, "an object")
        return
    known: dict[str, Any] = {}
    others = getattr(kind, "OTHERS", Any)
    if get_origin(kind) is dict:
        others = get_args(kind)[1]
    else:
        for name, hint, default in _fields(kind):
            known[name] = hint
            if default is None and name not in value:
                yield name, "is missing"
    for name, one in value.items():
        hint = known.get(name, others)
        if hint is not Any:
            yield from within(name, wrong(hint, one))


def within(name: str, found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Problems inside a part of this name."""
    for place, problem in found:
        yield f"{name}.{place}" if place else name, problem


def not_a(value: Any, wanted: str) -> str:
    """A message saying what a value is and what it must be."""
    return f"{shown(value)} is not {wanted}"


def shown(value: Any) -> str:
    """A value for a message, truncated if long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
