"""What a run does for the first time costs more: a pass of a new width, a drafter's pass over as
many accepted tokens as it never read at once.

This engine runs the first pass of a shape as it is and records the second one (engine.graphs); on
short texts that is a tenth of the time, and more where a floor gives every round another width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEEN = 2
"""Passes of a shape that cost more than those behind them."""

BEGINS, BEHIND_PART, BEHIND_WHOLE = range(3)
"""What a drafter reads before it drafts: the prompt; tokens of a draft that was accepted in part,
or was none; tokens of one of which nothing was left over, which it may not have read itself."""
N_KINDS = 3


def occurrences(keys: np.ndarray) -> np.ndarray:
    """How often each key, int64 [n], came before."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]][: len(keys)]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    found = np.empty(len(keys), np.int64)
    found[order] = np.arange(len(keys)) - first
    return found


def reading_kind(verified: np.ndarray, accepted: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What the drafter reads behind rounds: BEHIND_WHOLE or BEHIND_PART, [n]."""
    whole = (verified > 0) & (accepted == verified) & (steps == verified)
    return np.where(whole, BEHIND_WHOLE, BEHIND_PART)


@dataclass(frozen=True, slots=True)
class FirstTimes:
    """Milliseconds beyond what later ones take. passes: [SEEN], the first and second pass of a
    width in a run. drafts: [N_KINDS, SEEN], the same of drafts by what is read before them, for
    each number of tokens that are read."""

    passes: np.ndarray
    drafts: np.ndarray

    @classmethod
    def none(cls) -> FirstTimes:
        """Nothing costs more."""
        return cls(np.zeros(SEEN), np.zeros((N_KINDS, SEEN)))

    def of_passes(self, counts: np.ndarray) -> np.ndarray:
        """What so many passes of each width, [m, widths], take beyond: [m]."""
        return _beyond(counts, self.passes[None])

    def of_drafts(self, counts: np.ndarray) -> np.ndarray:
        """The same of drafts, counted by kind and tokens that are read: [m, N_KINDS, lengths]."""
        return _beyond(counts, self.drafts[:, None])


def typical(beyond: np.ndarray, nth: np.ndarray) -> np.ndarray:
    """[SEEN]: the median of milliseconds beyond later ones, [n], of what came for the nth time, 0
    where that was not seen. A median, as compiling a kernel is not what a run pays again."""
    chosen = (beyond[nth == i] for i in range(SEEN))
    return np.array([max(float(np.median(ms)), 0.0) if len(ms) else 0.0 for ms in chosen])


def _beyond(counts: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """counts: [m, …, n]; ms: […, SEEN]."""
    paid = np.minimum(counts[..., None], SEEN) > np.arange(SEEN)
    found: np.ndarray = (paid * ms).reshape(len(counts), -1).sum(1)
    return found
