"""How far drafts come: a falling line over the index in the draft."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QBrush, QPainter
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.trace_models.number_text import significant
from app.widgets.line_styles import plot_pen
from app.widgets.rate_chart import RateChart
from engine.analysis.survival import Survival

_DOT = 3.0
_MOST_LABELLED = 12
_MOST_TICKS = 8


class SurvivalChart(RateChart):
    """A dot for each index that drafts were judged at, its rate above it where there is room."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, "Survival by index in the draft", "index in draft", parent)
        self._shown = Survival(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def set_survival(self, found: Survival) -> None:
        """Show these rates."""
        self._shown = found
        rates = ", ".join(f"{i}: {significant(rate)}" for i, rate in self._rates())
        self.setAccessibleDescription(f"accepted up to index {rates}" if rates else "")
        self.update()

    def ticks(self) -> list[tuple[float, str]]:
        n = len(self._rates())
        step = max(1, -(-n // _MOST_TICKS))
        return [(self._x(i), str(i)) for i in range(0, n, step)]

    def tip(self, x: float) -> str:
        rates = self._rates()
        if not rates:
            return ""
        at = min(int(x * len(rates)), len(rates) - 1)
        judged, accepted = int(self._shown.judged[at]), int(self._shown.accepted[at])
        return (
            f"index {at}: {accepted:,} of the {judged:,} drafts judged here accepted, "
            f"{accepted / judged:.3f}; accepted from the first token to here: {rates[at][1]:.3f}"
        )

    def paint_rates(self, painter: QPainter) -> None:
        theme, metrics, rates = self.theme, self.fontMetrics(), self._rates()
        points = [self.place(self._x(i), rate) for i, rate in rates]
        colour = theme.color("accepted.line")
        painter.setPen(plot_pen(colour, 1.5))
        painter.drawPolyline(points)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QBrush(colour))
        for point in points:
            painter.drawEllipse(point, _DOT, _DOT)
        wide = metrics.horizontalAdvance("0.00 ")
        if len(rates) > _MOST_LABELLED or wide > self.area.width() / max(1, len(rates)):
            return
        painter.setPen(theme.color("plot.text"))
        for point, (_, rate) in zip(points, rates, strict=True):
            below = point.y() - metrics.height() - _DOT < self.area.top()
            top = point.y() + _DOT if below else point.y() - metrics.height() - _DOT
            box = QRectF(point.x() - wide / 2, top, wide, metrics.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, f"{rate:.2f}")

    def _rates(self) -> list[tuple[int, float]]:
        """The indices at which drafts were judged, and how many drafts came there."""
        rates = self._shown.rate
        return list(enumerate(rates[np.isfinite(rates)].tolist()))

    def _x(self, index: int) -> float:
        """Where an index lies, as a fraction of the width."""
        return (index + 0.5) / max(1, len(self._rates()))
