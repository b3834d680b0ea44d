"""Many values reduced to few: one for each column of pixels, or one for each round."""

from __future__ import annotations

import numpy as np


class PixelColumns:
    """Groups of neighbours that share a column of pixels; each its own group where all fit.

    x: where the values lie, ascending, float64 [n]; left, right: ends of what is in sight;
    n_pixels: columns in it. starts: first value of each group, int64 [groups], groups <= n_pixels.
    """

    def __init__(self, x: np.ndarray, left: float, right: float, n_pixels: int) -> None:
        self.n = len(x)
        if self.n <= n_pixels:
            self.starts = np.arange(self.n)
            return
        place = np.floor((x - left) * (n_pixels / (right - left)))
        place = np.clip(place, 0, n_pixels - 1)
        self.starts = np.flatnonzero(np.diff(place, prepend=-1.0))

    @property
    def is_exact(self) -> bool:
        """Whether every value has a group of its own."""
        return len(self.starts) == self.n

    def first(self, values: np.ndarray) -> np.ndarray:
        """The first value of each group."""
        return values[..., self.starts]

    def last(self, values: np.ndarray) -> np.ndarray:
        """The last value of each group."""
        if self.is_exact:
            return values
        stops = np.append(self.starts[1:], self.n)
        return values[..., stops - 1]

    def most(self, values: np.ndarray) -> np.ndarray:
        """The largest value of each group, along the last axis."""
        return self._reduce(np.maximum, values)

    def least(self, values: np.ndarray) -> np.ndarray:
        """The smallest value of each group, along the last axis."""
        return self._reduce(np.minimum, values)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of each group, along the last axis."""
        if self.is_exact:
            return values
        sums = self._reduce(np.add, values)
        return sums / np.diff(np.append(self.starts, self.n))

    def _reduce(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
        if self.is_exact:
            return values
        reduced: np.ndarray = how.reduceat(values, self.starts, axis=-1)
        return reduced


def envelope(
    x: np.ndarray, y: np.ndarray, left: float, right: float, n_pixels: int
) -> tuple[np.ndarray, np.ndarray]:
    """A line of at most n_pixels points with the same peaks: least and most of each column."""
    if len(x) <= n_pixels:
        return x, y
    columns = PixelColumns(x, left, right, max(1, n_pixels // 2))
    both = np.stack([columns.least(y), columns.most(y)], axis=1)
    return np.repeat(columns.first(x), 2), both.ravel()


def per_round(
    rounds: np.ndarray, values: np.ndarray, how: np.ufunc
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of rows, int64 [n] ascending, and values, [..., n]: every round once, [rounds], and
    what `how` makes of the values of its rows, [..., rounds]."""
    numbers, firsts = np.unique(rounds, return_index=True)
    if not len(numbers):
        return numbers, values
    return numbers, how.reduceat(values, firsts, axis=-1)
