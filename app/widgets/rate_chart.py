"""A small drawing of rates: an axis from 0 to 1 at the left, something else below, tooltips."""

from __future__ import annotations

from abc import abstractmethod

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.looks.theme import Theme
from app.widgets.line_styles import plot_pen

_TICKS = ((0.0, "0"), (0.5, "0.5"), (1.0, "1"))
_GAP = 4
_LEAST_LINES, _MOST_LINES = 7, 36
_MOST_SLENDER = 1.2
"""Height of the area by its width."""


class RateChart(QWidget):
    """Subclasses draw into `area`, in which `place` finds a rate at a fraction of the width."""

    def __init__(self, theme: Theme, name: str, below: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._below = below
        self.theme = theme
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMaximumHeight(_MOST_LINES * self.fontMetrics().height())
        self.setAccessibleName(name)

    @abstractmethod
    def paint_rates(self, painter: QPainter) -> None:
        """Draw everything but the axes."""

    @abstractmethod
    def ticks(self) -> list[tuple[float, str]]:
        """Labels below the area, each at a fraction of its width."""

    @abstractmethod
    def tip(self, x: float) -> str:
        """Text of the tooltip at a fraction of the width, empty for none."""

    @property
    def area(self) -> QRectF:
        """Where the rates are drawn, between the axes."""
        metrics = self.fontMetrics()
        left = metrics.horizontalAdvance("0.5") + 2 * _GAP
        bottom = 2 * metrics.height() + _GAP
        top = metrics.height() // 2 + 1
        wide = max(1, self.width() - left - 2 * _GAP)
        high = min(self.height() - bottom - top, round(_MOST_SLENDER * wide))
        return QRectF(left, top, wide, max(1, high))

    def place(self, x: float, rate: float) -> QPointF:
        """The point of a rate at a fraction of the width."""
        area = self.area
        return QPointF(area.left() + x * area.width(), area.bottom() - rate * area.height())

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(34 * metrics.averageCharWidth(), 12 * metrics.height())

    def minimumSizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(20 * metrics.averageCharWidth(), _LEAST_LINES * metrics.height())

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        theme, metrics, area = self.theme, self.fontMetrics(), self.area
        painter.fillRect(area, theme.color("plot.background"))
        for rate, text in _TICKS:
            at = self.place(0, rate)
            painter.setPen(QPen(theme.color("plot.grid")))
            painter.drawLine(at, QPointF(area.right(), at.y()))
            painter.setPen(theme.color("plot.text"))
            beside = QRectF(0, at.y() - metrics.height() / 2, area.left() - _GAP, metrics.height())
            painter.drawText(
                beside, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, text
            )
        wide = metrics.horizontalAdvance("00000")
        for x, text in self.ticks():
            middle = self.place(x, 0).x()
            box = QRectF(middle - wide, area.bottom() + 2, 2 * wide, metrics.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)
        under = area.translated(0, area.height() + metrics.height() + _GAP)
        under.setHeight(metrics.height())
        painter.drawText(under, Qt.AlignmentFlag.AlignCenter, self._below)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self.paint_rates(painter)
        painter.setPen(plot_pen(theme.color("plot.axis")))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        painter.end()

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            area, at = self.area, event.pos().toPointF()
            inside = area.contains(at)
            text = self.tip((at.x() - area.left()) / area.width()) if inside else ""
            QToolTip.showText(event.globalPos(), text, self)
            return True
        return super().event(event)
