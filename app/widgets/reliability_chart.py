"""Charts of rates from 0 to 1: calibration of a drafter's confidence, with the number of tokens per
bar."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from PySide6.QtCore import QPoint, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QPainter, QPen
from PySide6.QtWidgets import QSizePolicy

from app.looks import Theme
from app.trace_models.shown_text import short_count, significant
from app.widgets.build import TipWidget
from app.widgets.line_styles import plot_pen
from engine.analysis.draft_quality import Calibration

_TICKS = ((0.0, "0"), (0.5, "0.5"), (1.0, "1"))
_GAP = 4
_LEAST_LINES, _MOST_LINES = 7, 36
_MOST_SLENDER = 1.2
"""Largest ratio of height to width."""


class RateChart(TipWidget):
    """Base of rate charts: subclasses draw into `area`; `place` maps a rate at a fraction of the
    width."""

    def __init__(self, theme: Theme, name: str, below: str) -> None:
        super().__init__()
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
        """The drawing area between the axes."""
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

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(34 * metrics.averageCharWidth(), 12 * metrics.height())

    def minimumSizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        return QSize(20 * metrics.averageCharWidth(), _LEAST_LINES * metrics.height())

    def draw(self, painter: QPainter) -> None:
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

    def tip_at(self, at: QPoint) -> str:
        area = self.area
        inside = area.contains(at.toPointF())
        return self.tip((at.x() - area.left()) / area.width()) if inside else ""


_FEW = 10
"""A bar over fewer tokens is hollow: its rate is unreliable."""
_BAR_GAP = 1.5
_DOT = 2.5


class ReliabilityChart(RateChart):
    """A bar per confidence bin with the accepted rate, its count and its 95 % interval; a line
    through the bins' means; a dashed diagonal for perfect calibration."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "Confidence against acceptance", "confidence")
        self._shown: Calibration | None = None

    def set_calibration(self, found: Calibration | None) -> None:
        self._shown = found
        self.setAccessibleDescription("" if found is None else _words(found))
        self.update()

    def ticks(self) -> list[tuple[float, str]]:
        return [(0.0, "0"), (0.5, "0.5"), (1.0, "1")]

    def tip(self, x: float) -> str:
        found = self._shown
        if found is None:
            return ""
        at = min(int(x * len(found.n)), len(found.n) - 1)
        n, (low, high) = int(found.n[at]), found.interval
        bounds = f"confidence {at / len(found.n):.1f} to {(at + 1) / len(found.n):.1f}"
        if not n:
            return f"{bounds}: no token was verified"
        return (
            f"{bounds}: {int(found.accepted[at]):,} of {n:,} tokens accepted, {found.rate[at]:.3f} "
            f"(95 %: {low[at]:.3f} to {high[at]:.3f}); mean confidence "
            f"{found.mean_confidence[at]:.3f}"
        )

    def paint_rates(self, painter: QPainter) -> None:
        theme, found = self.theme, self._shown
        painter.setPen(plot_pen(theme.color("plot.text"), style=Qt.PenStyle.DashLine))
        painter.drawLine(self.place(0, 0), self.place(1, 1))
        if found is None:
            return
        n_bins, rate = len(found.n), found.rate
        low, high = found.interval
        filled = np.flatnonzero(found.n).tolist()
        for at in filled:
            box = QRectF(self.place(at / n_bins, rate[at]), self.place((at + 1) / n_bins, 0))
            box.adjust(_BAR_GAP, 0, -_BAR_GAP, 0)
            is_few = found.n[at] < _FEW
            painter.setPen(plot_pen(theme.color("accepted.line")) if is_few else Qt.PenStyle.NoPen)
            painter.setBrush(Qt.BrushStyle.NoBrush if is_few else theme.color("accepted.tint"))
            painter.drawRect(box)
            painter.setPen(QPen(theme.color("plot.axis")))
            middle = (at + 0.5) / n_bins
            painter.drawLine(self.place(middle, low[at]), self.place(middle, high[at]))
        points = [self.place(found.mean_confidence[at], rate[at]) for at in filled]
        painter.setPen(plot_pen(theme.color("accepted.line"), 1.5))
        painter.drawPolyline(points)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QBrush(theme.color("accepted.line")))
        for point in points:
            painter.drawEllipse(point, _DOT, _DOT)
        self._paint_counts(painter, found, filled)

    def _paint_counts(self, painter: QPainter, found: Calibration, filled: list[int]) -> None:
        """The tokens of each bin at the foot of its bar, rotated if space is short."""
        theme, metrics, area = self.theme, self.fontMetrics(), self.area
        width = area.width() / len(found.n)
        texts = {at: short_count(int(found.n[at])) for at in filled}
        widest = max(map(metrics.horizontalAdvance, texts.values()), default=0)
        painter.setPen(theme.color("ui.text"))
        for at, text in texts.items():
            foot = self.place((at + 0.5) / len(found.n), 0)
            if widest + 2 <= width:
                box = QRectF(
                    foot.x() - width / 2, foot.y() - metrics.height(), width, metrics.height()
                )
                middle = Qt.AlignmentFlag.AlignCenter
                # the interval's line would cross the figure
                in_bar = found.n[at] >= _FEW and found.rate[at] * area.height() >= box.height()
                ground = theme.color("accepted.tint" if in_bar else "plot.background")
                painter.fillRect(painter.boundingRect(box, middle, text), ground)
                painter.drawText(box, middle, text)
            elif metrics.height() <= width + 4:
                painter.save()
                painter.translate(QPointF(foot.x() - metrics.height() / 2, foot.y() - 3))
                painter.rotate(-90)
                box = QRectF(0, 0, area.height(), metrics.height())
                left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
                painter.drawText(box, left, text)
                painter.restore()


def _words(found: Calibration) -> str:
    bins = [
        f"{at / len(found.n):.1f} to {(at + 1) / len(found.n):.1f}: {significant(rate)} of {n:,}"
        for at, (n, rate) in enumerate(zip(found.n.tolist(), found.rate.tolist(), strict=True))
        if n
    ]
    return f"ECE {significant(found.ece)}; accepted by confidence {'; '.join(bins)}"
