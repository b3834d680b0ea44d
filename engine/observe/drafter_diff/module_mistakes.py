"""What a drafter's module may compute otherwise: one search over all that it computes. Each call of
a kernel, found by letting the module run, is left out or scaled, reads other numbers, rows or
weights (operations.py); layers are left out, ropes turned otherwise; always, or
only in what is written into memory, or while it drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from engine.model.layers import RopeTables
from engine.observe.drafter_diff.operations import (
    PHASES,
    PartChange,
    Site,
    is_part,
    operations,
    sites,
)
from engine.observe.drafter_diff.records import BLOCK, POSITIONS

_BASES = (10.0, 0.1, 100.0, 0.01, 50.0, 0.02)
_STRETCHES = (0.0, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0, -1.0)


def part_changes(
    core: Any, look: Callable[[], object], places: Sequence[int] = ()
) -> Iterator[PartChange]:
    """Changes of a module's parts, the likely ones first. look: has the module compute what it
    does in a draft. places: positions from which on a part may be wrong."""
    found = list(sites(core))
    yield from _ropes(found, places)
    yield from operations(found, look)
    yield from _layers(found)


def _ropes(found: Sequence[Site], places: Sequence[int]) -> Iterator[PartChange]:
    for site in found:
        ropes = [getattr(owner, site.name) for owner in site.owners]
        if not all(isinstance(rope, RopeTables) for rope in ropes):
            continue
        others: dict[str, Callable[[RopeTables], RopeTables]] = {}
        for base in _BASES:
            about = f"its rope has {base:g} times the frequency base, or about that"
            others[about] = methodcaller("turned", base=base)
        for stretch in _STRETCHES:
            about = f"its rope turns by {stretch:g} times the angles, as with another scaling"
            others[about] = methodcaller("turned", stretch=stretch)
        for share in (0.5, 0.25, 0.75):
            about = f"its rope turns the first {share:g} of its pairs alone (partial dimensions)"
            others[about] = methodcaller("turned", share=share)
        for at in places:
            about = f"positions from {at} on turn as {at} does"
            others[about] = methodcaller("turned", place=partial(torch.clamp, max=at))
            about = f"positions from {at} on turn as those from 0 on"
            others[about] = methodcaller("turned", place=partial(torch.remainder, other=at))
        for about, other in others.items():
            made = [(one, site.name, other(getattr(one, site.name))) for one in site.owners]
            phases = [*PHASES] if "by 0 times" in about else [""]
            yield PartChange(POSITIONS, about, tuple(made), phases)


def _layers(found: Sequence[Site]) -> Iterator[PartChange]:
    for site in found:
        value = getattr(site.owners[0], site.name)
        is_list = isinstance(value, list) and len(value) > 1 and all(map(is_part, value))
        if len(site.owners) > 1 or not is_list:
            continue
        orders = {
            f"its layer {i} is left out": value[:i] + value[i + 1 :] for i in range(len(value))
        }
        orders["its layers are run in reverse order"] = value[::-1]
        for about, order in orders.items():
            yield PartChange(BLOCK, about, ((site.owners[0], site.name, order),), ["draft"])
