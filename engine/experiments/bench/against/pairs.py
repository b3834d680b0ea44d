"""Figures of two sides that took turns, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides' tokens per second, one measured behind the other.

    idle_share: the share of a core that this process used while it waited for the other.
    """

    theirs: float
    ours: float
    idle_share: float


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """theirs, ours: medians, tokens per second. ratio: the median of the pairs' ratios, ours over
    theirs; low, high: the smallest and the largest of them. p: of the sign test."""

    theirs: float
    ours: float
    ratio: float
    low: float
    high: float
    p: float
    n_pairs: int


def take_turns(
    number: int, theirs: Callable[[], _T], ours: Callable[[], _U]
) -> tuple[_T, _U, float]:
    """Both results, and Pair.idle_share. The side that is first changes with the pair's number."""
    if number % 2:
        own = ours()
        other, idle_share = _waiting(theirs)
    else:
        other, idle_share = _waiting(theirs)
        own = ours()
    return other, own, idle_share


def _waiting(theirs: Callable[[], _T]) -> tuple[_T, float]:
    start, used = perf_counter(), process_time()
    result = theirs()
    return result, (process_time() - used) / (perf_counter() - start)


def paired_ratio(pairs: Sequence[Pair]) -> PairedRatio:
    """What at least one pair comes to."""
    ratios = [pair.ours / pair.theirs for pair in pairs]
    return PairedRatio(
        median(pair.theirs for pair in pairs),
        median(pair.ours for pair in pairs),
        median(ratios),
        min(ratios),
        max(ratios),
        sign_test(ratios),
        len(pairs),
    )


def sign_test(ratios: Sequence[float]) -> float:
    """Probability that at least as many ratios lie on one side of 1, were both sides equally
    likely; ratios of 1 count for neither. Two-sided and exact; 1 without any."""
    above = sum(ratio > 1 for ratio in ratios)
    below = sum(ratio < 1 for ratio in ratios)
    n = above + below
    tail = sum(comb(n, k) for k in range(max(above, below), n + 1)) / 2**n
    return min(1.0, 2 * tail)
