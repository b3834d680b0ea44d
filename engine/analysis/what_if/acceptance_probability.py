"""How likely drafted tokens are right, by their place in the draft and by confidence.

Drafts whose fate is known only in part (they were accepted as far as they went) count at each
place that they reached, as in the product-limit estimate of Kaplan and Meier (1958).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.analysis.what_if.recorded import RecordedRounds

_EDGES = np.linspace(0.0, 1.0, 11)
_SEED = 1


@dataclass(frozen=True, slots=True)
class SurvivalRates:
    """conditional: float [k], the share of tokens at each place of a draft that were right, of
    those after right ones. n: drafts that were judged there, int64 [k]."""

    conditional: np.ndarray
    n: np.ndarray

    @classmethod
    def of(cls, rounds: RecordedRounds) -> SurvivalRates:
        """From the drafts of a run. A place that no draft reached has the rate before it."""
        k = rounds.n_max
        right = np.bincount(rounds.accepted[rounds.drafted > 0], minlength=k + 1)
        judged_last = rounds.accepted[rounds.is_final & (rounds.drafted > 0)]
        wrong = np.bincount(judged_last, minlength=k + 1)
        passed = right[::-1].cumsum()[::-1][1 : k + 1]  # drafts with at least i + 1 right
        n = passed + wrong[:k]
        conditional, last = np.zeros(k), 0.0
        for i in range(k):
            if n[i]:
                last = float(passed[i] / n[i])
            conditional[i] = last
        return cls(conditional, n)

    @property
    def survival(self) -> np.ndarray:
        """Probability that the first i + 1 tokens of a draft are all right, float [k]."""
        found: np.ndarray = np.cumprod(self.conditional)
        return found

    def draw_more(self, reached: np.ndarray, wanted: int) -> np.ndarray:
        """How many more tokens would have been right, drawn by chance with numbers that stay the
        same: int64 of the shape of `reached`, the place in the draft of the first one; at most
        `wanted`."""
        if not len(self.conditional) or not wanted:
            return np.zeros(reached.shape, np.int64)
        random = np.random.default_rng(_SEED).random((*reached.shape, wanted))
        place = np.minimum(reached[..., None] + np.arange(wanted), len(self.conditional) - 1)
        right = random < self.conditional[place]
        found: np.ndarray = np.where(right.all(-1), wanted, np.argmin(right, -1))
        return found


@dataclass(frozen=True, slots=True)
class ConfidenceScale:
    """What the drafter's confidence was worth. rates: of the tokens in each tenth of it that were
    judged, the share that was right, float [10]; where none was, the middle of that tenth."""

    rates: np.ndarray

    @classmethod
    def of(cls, rounds: RecordedRounds) -> ConfidenceScale:
        """From the judged tokens of a run, the accepted and the first wrong one of each draft."""
        k = rounds.confidence.shape[1]
        place = np.arange(k)
        right = place < rounds.accepted[:, None]
        wrong = (place == rounds.accepted[:, None]) & rounds.is_final[:, None]
        judged = (right | wrong) & np.isfinite(rounds.confidence)
        tenth = _tenth(rounds.confidence[judged])
        n = np.bincount(tenth, minlength=10)
        n_right = np.bincount(tenth, right[judged], minlength=10)
        middle = (_EDGES[:-1] + _EDGES[1:]) / 2
        return cls(np.where(n > 0, n_right / np.maximum(n, 1), middle))

    def __call__(self, confidence: np.ndarray) -> np.ndarray:
        """Probability of being right, of the same shape; NaN stays."""
        known = np.isfinite(confidence)
        scaled = self.rates[_tenth(np.where(known, confidence, 0.0))]
        return np.where(known, scaled, np.nan)


def _tenth(confidence: np.ndarray) -> np.ndarray:
    return np.clip((confidence * 10).astype(np.int64), 0, 9)
