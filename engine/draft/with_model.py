"""What drafters with a model are set by, and how they draw; torch is not needed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.option_fields import FormRow, NumberRange, option
from engine.sampling.distribution import Distribution, softmax

_STREAM = 1
DRAFT_HEADS = {
    "auto": "a copy in two bits names the candidates where that is faster",
    "full": "the logits of the whole vocabulary",
}


@dataclass(frozen=True, kw_only=True)
class ModelDraftOptions:
    """Limits on drafts: p_min is a floor on each drafted token's own confidence, not on their
    product; a draft shorter than n_min is thrown away. draft_head: one of DRAFT_HEADS
    (engine.model.mtp)."""

    GROUP: ClassVar[str] = "speculation"
    n_max: int = option(
        3,
        "--spec-draft-n-max",
        "longest draft of draft-*, tokens",
        NumberRange(1, 64, "Choose a length from 1."),
        FormRow("n_max", 1, 64),
    )
    n_min: int = option(
        0, "--spec-draft-n-min", "a shorter draft is thrown away", FormRow("n_min", 0, 64)
    )
    p_min: float = option(
        0.0,
        "--spec-draft-p-min",
        "a draft ends before a token whose own probability is lower",
        NumberRange(0.0, 1.0, "Use 0 to switch it off."),
        FormRow("p_min", 0.0, 1.0),
        metavar="P",
    )
    draft_head: str = option(
        "auto",
        "--spec-draft-head",
        "what draft-mtp finds its tokens with, greedy and without p_min: {either}. auto names "
        "candidates by a copy of the output head in two bits, and the head judges them",
        choices=DRAFT_HEADS,
        metavar="HEAD",
    )


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
