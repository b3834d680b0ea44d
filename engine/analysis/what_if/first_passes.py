"""What a run does for the first time costs more: a pass of a new width, a drafter's pass over as
many accepted tokens as it never read at once.

This engine runs the first pass of a shape as it is and records it, or the second one
(engine.machine.graphs). Later runs of a session find recordings done, so such times say nothing of
them.
"""

from __future__ import annotations

import numpy as np

SEEN = 2
"""Passes of a shape that cost more than those behind them."""


def are_first(keys: np.ndarray) -> np.ndarray:
    """Which of the keys, int64 [n], are among the first SEEN equal ones: bool [n]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]][: len(keys)]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    found = np.empty(len(keys), bool)
    found[order] = np.arange(len(keys)) - first < SEEN
    return found
