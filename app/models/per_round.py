"""Values of the rows of a run put together by round: its sequences are one."""

from __future__ import annotations

import numpy as np


def per_round(
    rounds: np.ndarray, values: np.ndarray, how: np.ufunc
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of rows, int64 [n] ascending, and values, [..., n]: every round once, [rounds], and
    what `how` makes of the values of its rows, [..., rounds]."""
    numbers, firsts = np.unique(rounds, return_index=True)
    if not len(numbers):
        return numbers, values
    return numbers, how.reduceat(values, firsts, axis=-1)
