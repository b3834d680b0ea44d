"""The effective length of a draft: longest draft, confidence floor, shortest draft worth verifying.

The rules are those of engine.draft.model_drafter: a draft ends before the first token whose own
confidence is below p_min, which has cost a step of the drafter all the same; a draft shorter than
n_min is thrown away after it was made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DraftLengths(NamedTuple):
    """Of each draft, int64: tokens that would be verified, and steps that the drafter would do."""

    verified: np.ndarray
    steps: np.ndarray


def floors_at(confidence: np.ndarray, p_min: np.ndarray) -> np.ndarray:
    """Index of the first drafted token below each floor, k where there is none.

    confidence: float [n, k], NaN where the drafter has none: such a token passes. p_min: [m].
    Returns int64 [m, n].
    """
    n, k = confidence.shape
    found = np.full((len(p_min), n), k, np.int64)
    for row, floor in enumerate(p_min if k else ()):
        below = confidence < floor
        hit = below.any(1)
        found[row, hit] = below[hit].argmax(1)
    return found


def cut_lengths(
    available: np.ndarray,
    below_floor: np.ndarray,
    limit: np.ndarray,
    n_max: np.ndarray | int,
    n_min: np.ndarray | int = 0,
) -> DraftLengths:
    """Lengths of drafts under a setting, element by element.

    available: tokens that the drafter has to offer. below_floor: see floors_at. limit: tokens that
    context and token limit allow. All of them int64 [n].
    """
    room = np.minimum(np.minimum(available, limit), n_max)
    length = np.minimum(room, below_floor)
    # the token below the floor was drafted too, unless no more were asked for
    steps = length + (below_floor < room)
    return DraftLengths(np.where(length < n_min, 0, length), steps)
