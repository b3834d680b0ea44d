"""A logarithmic axis for errors that also has a place for an error of exactly 0."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.trace_models.number_text import EXACT, NOT_FINITE

_LEAST, _MOST = -30, 30
_MOST_LABELS = 6


@dataclass(frozen=True, slots=True)
class LogAxis:
    """Decades low..high as y-values, with lines of their own for what has no logarithm.

    exact: y of a value of 0, under the lowest decade. marks: y of a row of signs under it.
    not_finite: y of NaN and infinity, above the highest decade.
    """

    low: int
    high: int
    exact: float
    marks: float
    not_finite: float

    @classmethod
    def over(cls, values: np.ndarray) -> LogAxis:
        """An axis of at least two decades that shows all values [n]."""
        shown = values[np.isfinite(values) & (values > 0)]
        low, high = -9, -7
        if len(shown):
            low = max(_LEAST, math.floor(math.log10(shown.min())))
            high = min(_MOST, math.ceil(math.log10(shown.max())))
        high = max(high, low + 2)
        unit = (high - low) / 6
        return cls(low, high, low - unit, low - 2 * unit, high + unit)

    @property
    def y_range(self) -> tuple[float, float]:
        """Lowest and highest y of the plot: the whole axis, with a margin at both ends."""
        unit = self.low - self.exact
        return self.marks - 0.7 * unit, self.not_finite + 0.3 * unit

    def y(self, values: np.ndarray) -> np.ndarray:
        """Where errors >= 0 are drawn, float64 of the same shape."""
        finite = np.isfinite(values)
        y = np.full(values.shape, self.not_finite)
        y[finite & (values == 0)] = self.exact
        at = finite & (values > 0)
        y[at] = np.clip(np.log10(values[at]), self.low, self.high)
        return y

    def ticks(self, values: np.ndarray, gap: float = 0.0) -> list[tuple[float, str]]:
        """Labels for some decades, for 0, and for what is not finite if there is any.

        gap: decades that a label needs for itself; decades make way for the other two.
        """
        step = max(1, math.ceil((self.high - self.low) / (_MOST_LABELS - 1)), math.ceil(gap))
        ends = [(self.exact, EXACT)]
        if not np.isfinite(values).all():
            ends.append((self.not_finite, NOT_FINITE))
        decades = range(self.high, self.low - 1, -step)
        ticks = [(float(e), decade(e)) for e in decades if all(abs(e - y) >= gap for y, _ in ends)]
        ticks += ends
        return ticks


def decade(exponent: int) -> str:
    """A power of ten as it is written on an axis."""
    return {-1: "0.1", 0: "1", 1: "10", 2: "100"}.get(exponent, f"1e{exponent}")
