"""The colours of relative errors on a log scale, and the bar that explains them."""

from __future__ import annotations

from PySide6.QtCore import QRect, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.looks.theme import Theme
from app.panels.divergence.log_axis import decade
from app.trace_models.number_text import EXACT

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
