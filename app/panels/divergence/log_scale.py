"""The colours of relative errors on a log scale, and the bar that explains them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QRect, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.looks.theme import Theme
from app.trace_models.number_text import EXACT, NOT_FINITE

LOW, HIGH = -8, 0
"""Decades at the ends: rounding of float32, and an error as large as the state itself."""
_LABELLED = (0, -2, -4, -6, -8)
_BAR = 10


def gradient(theme: Theme, n: int) -> list[QColor]:
    """n colours from the least to the largest error."""
    low, middle, high = (theme.color(f"heat.{name}") for name in ("low", "middle", "high"))
    colours = []
    for step in range(n):
        at = 2 * step / max(1, n - 1)
        colours.append(_mixed(low, middle, at) if at < 1 else _mixed(middle, high, at - 1))
    return colours


def _mixed(one: QColor, two: QColor, share: float) -> QColor:
    return QColor.fromRgbF(
        one.redF() + (two.redF() - one.redF()) * share,
        one.greenF() + (two.greenF() - one.greenF()) * share,
        one.blueF() + (two.blueF() - one.blueF()) * share,
    )


class LogScale(QWidget):
    """A column of colour with its decades, and a box for no error at all under it."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Colours of the state error")
        self.setAccessibleDescription(
            f"Relative error from {decade(LOW)} to {decade(HIGH)}, log scale; "
            "equal states have a colour of their own"
        )
        self.setToolTip("Relative error |a - b| / |a| against the reference lane's state")

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        widest = max(metrics.horizontalAdvance(t) for t in (EXACT, decade(LOW)))
        return QSize(_BAR + 5 + widest, 4 * metrics.height())

    def minimumSizeHint(self) -> QSize:
        return QSize(self.sizeHint().width(), 3 * self.fontMetrics().height())

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        line = self.fontMetrics().height()
        half = line // 2
        box = QRect(0, half, _BAR, self.height() - half - line - 6)
        colours = gradient(self._theme, max(2, box.height()))
        for y in range(box.height()):
            painter.fillRect(0, box.bottom() - y, _BAR, 1, colours[y])
        painter.setPen(self._theme.color("ui.muted"))
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        fits = box.height() >= (len(_LABELLED) - 1) * line
        for exponent in _LABELLED if fits else (HIGH, LOW):
            y = box.bottom() - round((exponent - LOW) / (HIGH - LOW) * (box.height() - 1))
            place = QRect(_BAR + 5, y - half, self.width(), line)
            painter.drawText(place, left, decade(exponent))
        square = QRect(0, self.height() - half - _BAR // 2, _BAR, _BAR)
        painter.fillRect(square, self._theme.color("heat.exact"))
        place = QRect(_BAR + 5, self.height() - line, self.width(), line)
        painter.drawText(place, left, EXACT)
        painter.end()


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
