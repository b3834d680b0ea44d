"""How far drafts come: the part that is accepted up to each index.

A draft that ended early says nothing of the indices after its end, so it is left out of them
(the product-limit estimate of Kaplan and Meier, JASA 1958). That takes for granted that drafts cut
short would have fared like the others; where p_min cuts them, they would have fared worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Survival:
    """By index in the draft, [K] each. judged: drafts whose token there was judged, int64.
    accepted: those whose token was accepted, int64."""

    judged: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray) -> Survival:
        """From counts[d, a], steps that drafted d and accepted a tokens, int64 [K + 1, K + 1]."""
        n_max = len(counts) - 1
        index = np.arange(n_max)
        drafts_it = np.arange(n_max + 1)[None, :] > index[:, None]  # [K, lengths]
        judged = np.array([counts[longer, i:].sum() for i, longer in enumerate(drafts_it)])
        accepted = np.array([counts[longer, i + 1 :].sum() for i, longer in enumerate(drafts_it)])
        return cls(judged.astype(np.int64), accepted.astype(np.int64))

    @property
    def rate(self) -> np.ndarray:
        """Share of drafts accepted up to and with each index, float64 [K]; NaN from the first
        index that no draft was judged at."""
        steps = np.full(len(self.judged), np.nan)
        np.divide(self.accepted, self.judged, out=steps, where=self.judged > 0)
        return np.cumprod(steps)
