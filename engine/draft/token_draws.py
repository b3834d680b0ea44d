"""How a model drafter draws tokens when they are judged by rejection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.sampling.distribution import Distribution, softmax

_STREAM = 1


class TokenDraws:
    """Draws from the candidates' softmax at the run's temperature, temp > 0.

    Every sequence has random numbers of its own, apart from its sampler's and the same whatever
    runs beside it. All model drafters of a run share them, so that none repeats another's.
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
        """What a token that was kept was drawn from: the candidates that `passed`, bool [k].

        A drawn token that does not pass is no draft at all, so what is drafted is distributed
        over the others alone.
        """
        return Distribution.of_weights(np.array(ids), np.where(passed, self._weights(logits), 0))

    def forget(self, seq: int) -> None:
        """The sequence has ended; the next in its slot draws afresh."""
        self._random.pop(seq, None)

    def _weights(self, logits: Sequence[float]) -> np.ndarray:
        return softmax(np.array(logits), self._temp)
