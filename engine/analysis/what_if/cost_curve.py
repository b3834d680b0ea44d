"""Milliseconds by a number, from what was measured: the mean of the times at each number, a
straight line between two that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LEAST_TIMES = 4
"""A number timed less often than that, in warm-up rounds perhaps, is not counted next to others
that were timed as often."""
_OUTLIER = 4.0
"""A time this many times the median of its kind is the machine's doing, and not counted,"""
_FEW = 8
"""where there are at least this many."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by a number. at: the numbers measured, ascending; ms, n: mean and count."""

    at: np.ndarray
    ms: np.ndarray
    n: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, ms: np.ndarray, *, all_count: bool = False) -> CostCurve:
        """From measured times, [n] each, without NaN, and unless all_count without outliers and
        numbers that were timed too seldom."""
        known = np.isfinite(ms)
        at, place = np.unique(numbers[known], return_inverse=True)
        values = ms[known]
        means, counts = np.zeros(len(at)), np.zeros(len(at), np.int64)
        for i in range(len(at)):
            mine = values[place == i]
            if not all_count and len(mine) >= _FEW and (middle := float(np.median(mine))) > 0:
                mine = mine[mine <= _OUTLIER * middle]
            means[i], counts[i] = mine.mean(), len(mine)
        enough = counts >= (0 if all_count else min(LEAST_TIMES, int(counts.max(initial=0))))
        return cls(at[enough], means[enough], counts[enough])

    @classmethod
    def of_points(cls, points: Mapping[int, float]) -> CostCurve:
        """From times known by number, such as those of `bench forward`."""
        at = np.array(sorted(points), np.int64)
        return cls(at, np.array([points[i] for i in at.tolist()]), np.ones(len(at), np.int64))

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Milliseconds at each number; outside the measured ones that of the nearest, 0 if none."""
        if not len(self.at):
            return np.zeros(np.shape(numbers))
        found: np.ndarray = np.interp(numbers, self.at, self.ms)
        return found

    def trusted(self, least: int) -> CostCurve:
        """Without numbers that were measured less than this many times, but for the outermost."""
        kept = self.n >= least
        kept[:1] = kept[-1:] = True
        return CostCurve(self.at[kept], self.ms[kept], self.n[kept])

    def from_nothing(self) -> CostCurve:
        """The curve with 0 at 0, and as steep after the last number as from 0 to it."""
        if not len(self.at) or self.at[-1] <= 0:
            return CostCurve.of_points({0: 0.0})
        there = self.at > 0
        far = int(self.at[-1]) * 64
        return CostCurve(
            np.r_[0, self.at[there], far],
            np.r_[0.0, self.ms[there], self.ms[-1] * 64],
            np.r_[0, self.n[there], 0],
        )
