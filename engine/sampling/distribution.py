"""A probability distribution over a few tokens of the vocabulary, and draws from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_STREAM = 1


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Tokens that may be drawn, with their probabilities; every other token has probability 0.

    ids: int64 [k], distinct. probs: float64 [k], above 0, with sum 1.
    """

    ids: np.ndarray
    probs: np.ndarray

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """Probability 1 for one token: a greedy choice, or a proposal of an n-gram table."""
        return _certain(token)

    @classmethod
    def of_weights(cls, ids: np.ndarray, weights: np.ndarray) -> Distribution:
        """Normalise weights [k], none negative and not all 0; tokens of weight 0 are omitted."""
        kept = weights > 0
        return cls(ids[kept], weights[kept] / weights[kept].sum())

    def of(self, token: int) -> float:
        """The probability of a token."""
        if len(self.ids) == 1:
            return float(self.probs[0]) if self.ids[0] == token else 0.0
        return float(self.probs[self.ids == token].sum())

    def at(self, uniform: float) -> int:
        """The token at a number in [0, 1) of the cumulative distribution, in the order of `ids`."""
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
    with np.errstate(over="ignore"):  # a tiny temperature sends all others to -inf
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temp)
    return np.asarray(weights / weights.sum())


class TokenDraws:
    """Samples from the candidates' softmax at the run's temperature, temp > 0.

    Every sequence has its own random numbers, independent of its sampler and of other sequences.
    All model drafters of a run share them, so that none repeats another's.
    """

    def __init__(self, temp: float, seed: int) -> None:
        self._temp, self._seed = temp, seed
        self._random: dict[int, np.random.Generator] = {}

    def rank(self, seq: int, logits: Sequence[float]) -> int:
        """Index of the candidate drawn. logits: [k]."""
        if seq not in self._random:
            stream = np.random.SeedSequence(self._seed, spawn_key=(_STREAM,))
            self._random[seq] = np.random.Generator(np.random.PCG64(stream))
        ranks = Distribution.of_weights(np.arange(len(logits)), self._weights(logits))
        return ranks.at(float(self._random[seq].random()))

    def q(self, ids: Sequence[int], logits: Sequence[float], passed: np.ndarray) -> Distribution:
        """The distribution of a kept token: over the candidates that `passed`, bool [k].

        A sampled token that does not pass is never drafted, so drafts are distributed over the
        others.
        """
        return Distribution.of_weights(np.array(ids), np.where(passed, self._weights(logits), 0))

    def forget(self, seq: int) -> None:
        """The sequence has ended; the next one in its slot gets new random numbers."""
        self._random.pop(seq, None)

    def _weights(self, logits: Sequence[float]) -> np.ndarray:
        return softmax(np.array(logits), self._temp)
