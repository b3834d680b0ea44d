"""What a campaign is: cases drawn at random, and what must hold for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

Case = dict[str, Any]
"""One case as JSON has it: nothing but it decides what is played. Items of its lists and of its
entry `settings` may be left out, so that the frame can look for a smaller case that fails too."""

Figures = dict[str, float]
"""Figures of cases: they are added up, but of names that end in `_max` the largest counts."""

_APART = 1009
"""Between the numbers of two seeds; prime, and so no multiple of how many things there are."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Campaign:
    """Random cases, each played in a child process that is forked from a warmed parent.

    holds: what must hold, in a sentence. draw(random, number): the case of a number, which chooses
    what is played in turn. play(case, folder): plays it in an empty folder; whatever it raises is
    what is wrong, and so is a process that it leaves behind. prepare: imports and loads once, in
    the parent, what all cases need. seconds: limit of a case. n_bytes: how much memory a child may
    take beyond its parent's. batch: cases that one child plays. share: part of the time, against
    the others. n_least: cases that are played however long they take, so that thresholds do not
    depend on the machine. n_all: how many cases there are, None = without end. stalled_s: longest
    time that a child may not beat (tests.torture.heart) where it says that it does, None = any.
    """

    name: str
    holds: str
    draw: Callable[[np.random.Generator, int], Case]
    play: Callable[[Case, Path], Figures]
    prepare: Callable[[], None] = nothing
    seconds: float = 30.0
    n_bytes: int = 2**28
    batch: int = 1
    share: float = 1.0
    n_least: int = 1
    n_all: int | None = None
    stalled_s: float | None = None

    def case(self, seed: int, number: int) -> Case:
        """The same one for the same seed and number. What is played in turn begins elsewhere with
        every seed."""
        random = np.random.default_rng((seed, crc32(self.name.encode()), number))
        return self.draw(random, number + _APART * seed)


def added(total: Figures, more: Figures) -> None:
    """Add figures to a total, in place."""
    for name, value in more.items():
        old = total.get(name, 0)
        total[name] = max(old, value) if name.endswith("_max") else old + value
