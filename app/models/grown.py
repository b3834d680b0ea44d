"""A column of numbers that grows at its end."""

from __future__ import annotations

import numpy as np


class Grown:
    """An array with room to spare; `values` is what has been added."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._array: np.ndarray = np.empty(1024, dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def values(self) -> np.ndarray:
        """A view of everything added, [n]."""
        return self._array[: self._n]

    def add(self, values: np.ndarray) -> None:
        """Put more at the end."""
        stop = self._n + len(values)
        if stop > len(self._array):
            grown = np.empty(max(stop, 2 * len(self._array)), self._array.dtype)
            grown[: self._n] = self.values
            self._array = grown
        self._array[self._n : stop] = values
        self._n = stop
