"""What trees of drafts would have gained, estimated from the candidates of a recorded chain.

The tree has the recorded chain and next to it single tokens: at a place (index in the draft, rank
among the drafter's candidates) it holds that candidate as well. Where the chain was rejected at
this index and the target chose that candidate, the tree's step emits one token more: the
candidate is accepted and the target's token after it follows. What is assumed beyond that is
listed in `ASSUMPTIONS`. What drafted trees bring (engine.draft.tree) is measured by running them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.trace.records import N_TOP

LEAVES = (2, 4, 8)
ASSUMPTIONS = (
    "the chain and next to it single candidates, at the same places in every step",
    "the places that would have helped most in this run",
    "nothing is drafted after such a candidate",
    f"candidates beyond the first {N_TOP} are not recorded and count as missed",
    "every branch of a recurrent layer keeps a state of its own, which costs nothing here",
)


@dataclass(frozen=True, slots=True)
class TreeGain:
    """A tree of n_leaves. tokens_per_step: with the tree. places: (index in the draft, rank) of
    the candidates next to the chain; fewer where no other would ever have helped."""

    n_leaves: int
    tokens_per_step: float
    places: tuple[tuple[int, int], ...]

    @property
    def n_more(self) -> int:
        """Tokens that a step verifies beyond those of the chain."""
        return len(self.places)


def tree_gains(
    ranks: np.ndarray, n_steps: int, n_accepted: int, leaves: Sequence[int] = LEAVES
) -> list[TreeGain]:
    """Estimates for trees of this many leaves.

    ranks[i, r - 1]: steps rejected at index i in which the target chose the candidate of rank r,
    int64 [K, N_TOP]; n_steps: steps that could be counted so, accepted or not; n_accepted: tokens
    accepted in them. No steps, no estimates.
    """
    if not n_steps:
        return []
    chain = 1 + n_accepted / n_steps
    order = np.argsort(-ranks, axis=None, kind="stable")
    order = order[ranks.flat[order] > 0]
    found = []
    for n in leaves:
        best = order[: n - 1]
        index, rank = np.unravel_index(best, ranks.shape)
        places = tuple(zip(index.tolist(), (rank + 1).tolist(), strict=True))
        found.append(TreeGain(n, chain + int(ranks.flat[best].sum()) / n_steps, places))
    return found


@dataclass(frozen=True, slots=True)
class WidthCost:
    """How many times as long a wider pass takes. is_measured: passes as wide were recorded, or some
    on both sides of it; else it is a guess from how the cost grew with the width so far."""

    ratio: float
    is_measured: bool


def width_cost(
    widths: np.ndarray, ms: np.ndarray, n: np.ndarray, width: float, n_more: int
) -> WidthCost | None:
    """A pass over width + n_more tokens against one over width.

    widths, ascending, ms and n, [k] each: the mean time of n passes. Between widths a straight
    line, beyond the last one the slope of all of them (least squares), and never less than the
    narrower one. None where that needs two widths and there are fewer, or the narrower pass was not
    measured.
    """
    if not len(widths) or not widths[0] <= width <= widths[-1]:
        return None
    wider = width + n_more
    now, then = np.interp([width, wider], widths, ms).tolist()
    is_measured = bool(wider <= widths[-1])
    if not is_measured:
        off = widths - np.average(widths, weights=n)
        if len(widths) < 2:
            return None
        slope = float((n * off * ms).sum() / (n * off * off).sum())
        then = max(then, now) + max(slope, 0.0) * float(wider - widths[-1])
    return WidthCost(then / now, is_measured) if now > 0 else None
