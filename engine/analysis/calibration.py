"""Whether a drafter's confidence can be trusted: how often tokens were accepted of which it was
so sure (a reliability diagram), and how far the two are apart on average (ECE).

Only tokens that the target judged count: of a token after a rejected one no one knows. A p_min
leaves out the tokens below it, so that their bins stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

N_BINS = 10
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sums over bins of equal width on 0 … 1, [n_bins] each; those of two runs can be added.

    n: tokens, int64. accepted: how many the target accepted, int64. confidence: the sum of their
    confidences, float64.
    """

    n: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray

    @classmethod
    def of(cls, confidence: np.ndarray, accepted: np.ndarray, n_bins: int = N_BINS) -> Calibration:
        """Of judged tokens: confidence float [n], accepted bool [n]. Tokens without a confidence
        (NaN) are left out."""
        known = np.isfinite(confidence)
        p, accepted = np.clip(confidence[known], 0.0, 1.0), accepted[known]
        bins = np.minimum((p * n_bins).astype(np.int64), n_bins - 1)
        return cls(
            np.bincount(bins, minlength=n_bins),
            np.bincount(bins[accepted], minlength=n_bins),
            np.bincount(bins, p, n_bins),
        )

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(
            self.n + other.n, self.accepted + other.accepted, self.confidence + other.confidence
        )

    @property
    def n_tokens(self) -> int:
        """Tokens in all bins."""
        return int(self.n.sum())

    @property
    def mean_confidence(self) -> np.ndarray:
        """Mean confidence of each bin, NaN where it is empty, float64 [n_bins]."""
        return _over(self.confidence, self.n)

    @property
    def rate(self) -> np.ndarray:
        """Accepted / judged of each bin, NaN where it is empty, float64 [n_bins]."""
        return _over(self.accepted, self.n)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % interval of each rate (Wilson), NaN where a bin is empty."""
        n, rate = np.where(self.n, self.n, np.nan), self.rate
        centre = (rate + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * np.sqrt(rate * (1 - rate) / n + _Z**2 / (4 * n**2))
        return centre - half, centre + half

    @property
    def ece(self) -> float | None:
        """Expected calibration error: the mean over tokens of |rate - confidence| of their bin.
        None without a token."""
        if not self.n_tokens:
            return None
        return float(np.abs(self.accepted - self.confidence).sum()) / self.n_tokens

    @property
    def excess(self) -> float | None:
        """Mean confidence minus the rate over all tokens: above 0 the drafter is too sure."""
        if not self.n_tokens:
            return None
        return float(self.confidence.sum() - self.accepted.sum()) / self.n_tokens


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.full(len(whole), np.nan)
    return np.divide(part, whole, out=result, where=whole > 0)
