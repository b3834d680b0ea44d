"""The smallest case that still fails as a given one does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from tests.torture import awake
from tests.torture.campaign import Case

_SETTINGS = "settings"


def smallest(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """Leave out items of lists and settings, many at once first, as long as it fails and time is
    left."""
    until = awake.now() + seconds
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            if awake.now() > until:
                return case
            if fails(smaller):
                case, found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for path, holder in _holders(case, ()):
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        n = len(keys)
        while n:
            for start in range(0, len(keys), n):
                yield _without(case, path, keys[start : start + n])
            n //= 2


def _holders(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Lists, and dictionaries of settings, with where they are; outer ones first."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if (isinstance(inner, list) or key == _SETTINGS) and inner:
            yield (*path, key), inner
        if isinstance(inner, dict | list):
            yield from _holders(inner, (*path, key))


def _without(case: Case, path: tuple[Any, ...], keys: list[Any]) -> Case:
    result = copy.deepcopy(case)
    holder: Any = result
    for key in path:
        holder = holder[key]
    for key in reversed(keys):
        del holder[key]
    return result
