"""A probability distribution over a few tokens of the vocabulary."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Tokens that may be drawn, and how likely each is; every other token has probability 0.

    ids: int64 [k], each once. probs: float64 [k], above 0, of sum 1.
    """

    ids: np.ndarray
    probs: np.ndarray

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """Probability 1 for one token: a greedy choice, or a proposal of an n-gram table."""
        return _certain(token)

    @classmethod
    def of_weights(cls, ids: np.ndarray, weights: np.ndarray) -> Distribution:
        """Normalise weights [k], none negative and not all 0; tokens of weight 0 are left out."""
        kept = weights > 0
        return cls(ids[kept], weights[kept] / weights[kept].sum())

    def of(self, token: int) -> float:
        """The probability of a token."""
        if len(self.ids) == 1:
            return float(self.probs[0]) if self.ids[0] == token else 0.0
        return float(self.probs[self.ids == token].sum())

    def at(self, uniform: float) -> int:
        """The token that a number in [0, 1) falls on, tokens lying in their order here."""
        if len(self.ids) == 1:
            return int(self.ids[0])
        rank = np.searchsorted(np.cumsum(self.probs), uniform, side="right")
        return int(self.ids[min(int(rank), len(self.ids) - 1)])


@functools.lru_cache(1024)
def _certain(token: int) -> Distribution:
    ids, probs = np.array([token]), np.ones(1)
    ids.flags.writeable = probs.flags.writeable = False
    return Distribution(ids, probs)


def softmax(logits: np.ndarray, temp: float = 1.0) -> np.ndarray:
    """Softmax of logits [k] at a temperature above 0; float64, sum 1."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temp)
    return np.asarray(weights / weights.sum())
