"""Acceptance charts: drafts by length and accepted tokens, and three rates by index in the draft
that are easily confused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPoint, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPen

from app.looks import Theme
from app.trace_models.shown_text import significant
from app.widgets.build import TipWidget
from app.widgets.legend import Swatch
from app.widgets.line_styles import DASHES, draw_bar, draw_diamond, draw_triangle
from app.widgets.plot_surface import PlotSurface

_X_NAME, _Y_NAME = "drafted", "accepted"
_LEAST_TEXT_SHARE = 1.15
_LEAST_CELL_PIXELS = 2
_MOST_TOLD = 64
"""Draft lengths described in words."""


class DraftHistogram(TipWidget):
    """A table of cells: a column per draft length, a row per number of accepted tokens.

    A cell's filled height is its share of the drafts of that length; the percentage is written in
    it if it fits.
    """

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._counts = np.zeros((1, 1), np.int64)
        self.setAccessibleName("Accepted tokens by draft length")
        self._theme = theme

    def set_counts(self, counts: np.ndarray) -> None:
        """counts[d, a]: steps with d drafted and a accepted tokens, [K + 1, K + 1]."""
        if np.array_equal(counts, self._counts):
            return
        self._counts = counts
        lengths = np.flatnonzero(counts.any(axis=1)).tolist()[:_MOST_TOLD]
        self.setAccessibleDescription(
            "; ".join(
                f"{d} drafted: "
                + ", ".join(
                    f"{n} steps accepted {a}" for a, n in enumerate(counts[d].tolist()) if n
                )
                for d in lengths
            )
        )
        self.update()

    @property
    def x_name(self) -> str:
        """The name below: it names both axes if there is no room at the side."""
        room = self._area().height()
        fits = self.fontMetrics().horizontalAdvance(_Y_NAME) <= room
        return _X_NAME if fits else f"{_Y_NAME} by {_X_NAME}"

    def sizeHint(self) -> QSize:
        return QSize(26 * self.fontMetrics().averageCharWidth(), 6 * self.fontMetrics().height())

    def minimumSizeHint(self) -> QSize:
        return QSize(0, 0)

    def draw(self, painter: QPainter) -> None:
        theme, metrics = self._theme, self.fontMetrics()
        painter.fillRect(self.rect(), theme.color("plot.background"))
        area, n = self._area(), len(self._counts) - 1
        painter.setPen(theme.color("plot.text"))
        centred = Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignBottom
        below = QRectF(area.left(), 0, area.width(), self.height() - 2)
        painter.drawText(below, centred, self.x_name)
        if self.x_name == _X_NAME:
            painter.save()
            painter.translate(0, area.bottom())
            painter.rotate(-90)
            beside = QRectF(0, 0, area.height(), metrics.height())
            painter.drawText(beside, Qt.AlignmentFlag.AlignCenter, _Y_NAME)
            painter.restore()
        if n < 1:
            return
        step_x = max(1, int(np.ceil(metrics.horizontalAdvance("00 ") / (area.width() / n))))
        step_y = max(1, int(np.ceil(metrics.height() / (area.height() / (n + 1)))))
        for d in range(1, n + 1):
            box = self._cell(d, 0)
            if (d - 1) % step_x == 0:
                below = QRectF(box.left(), area.bottom() + 1, box.width(), metrics.height())
                painter.drawText(below, Qt.AlignmentFlag.AlignCenter, str(d))
        for a in range(0, n + 1, step_y):
            box = self._cell(1, a)
            beside = QRectF(0, box.top(), area.left() - 4, box.height())
            painter.drawText(
                beside, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, str(a)
            )
        for d, a in self._cells_to_paint(area):
            self._paint_cell(painter, d, a)

    def _cells_to_paint(self, area: QRectF) -> list[tuple[int, int]]:
        """All cells; if they are too small, only those with steps, one per pixel."""
        n = len(self._counts) - 1
        width, height = area.width() / n, area.height() / (n + 1)
        if min(width, height) >= _LEAST_CELL_PIXELS:
            return [(d, a) for d in range(1, n + 1) for a in range(d + 1)]
        drafted, accepted = np.nonzero(self._counts)
        pixels = np.stack([drafted * width, accepted * height]).astype(np.int64)
        _, kept = np.unique(pixels, axis=1, return_index=True)
        return list(zip(drafted[kept].tolist(), accepted[kept].tolist(), strict=True))

    def _paint_cell(self, painter: QPainter, drafted: int, accepted: int) -> None:
        theme, metrics = self._theme, self.fontMetrics()
        box = self._cell(drafted, accepted).adjusted(0.5, 0.5, -1.5, -1.5)
        of = int(self._counts[drafted].sum())
        share = int(self._counts[drafted, accepted]) / of if of else 0.0
        fill = QRectF(box)
        fill.setTop(box.bottom() - box.height() * share)
        role = "accepted.tint" if accepted == drafted else "rejected.tint"
        painter.fillRect(fill, theme.color(role))
        painter.setPen(QPen(theme.color("plot.grid")))
        painter.drawRect(box)
        text = f"{100 * share:.0f}%"
        room = metrics.horizontalAdvance("100%") * _LEAST_TEXT_SHARE
        if of and box.width() >= room and box.height() >= metrics.height():
            painter.setPen(theme.color("ui.text"))
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)

    def tip_at(self, at: QPoint) -> str:
        area, n = self._area(), len(self._counts) - 1
        if n < 1 or not area.contains(at.toPointF()):
            return ""
        drafted = min(int((at.x() - area.left()) / area.width() * n) + 1, n)
        accepted = min(int((area.bottom() - at.y()) / area.height() * (n + 1)), n)
        if accepted > drafted:
            return ""
        steps, of = self._counts[drafted, accepted], self._counts[drafted].sum()
        return f"{drafted} drafted, {accepted} accepted: {steps:,} of {of:,} steps"

    def _area(self) -> QRectF:
        metrics = self.fontMetrics()
        left = metrics.height() + metrics.horizontalAdvance("00") + 6
        bottom = 2 * metrics.height() + 3
        return QRectF(left, 4, max(1, self.width() - left - 2), max(1, self.height() - bottom - 4))

    def _cell(self, drafted: int, accepted: int) -> QRectF:
        area, n = self._area(), len(self._counts) - 1
        width, height = area.width() / n, area.height() / (n + 1)
        return QRectF(
            area.left() + (drafted - 1) * width,
            area.bottom() - (accepted + 1) * height,
            width,
            height,
        )


RATES = ("unconditional", "unconditional_given_drafted", "conditional")
_SYMBOLS = ("s", "t", "d")
_ROLES = ("lane.first", "lane.second", "lane.third")
_DASHES = (Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine, Qt.PenStyle.DotLine)
SWATCHES = (
    Swatch(
        "unconditional", _ROLES[0], "unconditional: accepted at this index / all steps", draw_bar
    ),
    Swatch(
        "given drafted",
        _ROLES[1],
        "unconditional_given_drafted: accepted at this index / steps that drafted so far",
        draw_triangle,
    ),
    Swatch(
        "conditional",
        _ROLES[2],
        "conditional: accepted at this index / drafted here with all before accepted",
        draw_diamond,
    ),
)


class PositionRatesPlot(PlotSurface):
    """Three lines over the index in the draft; an index that was never reached has no point."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "0.5 0 ")
        self.setAccessibleName("Acceptance by index in the draft")
        self.getPlotItem().getAxis("left").setTicks([[(0, "0"), (0.5, "0.5"), (1, "1")]])
        self.name_axes("rate", "index in draft")
        looks = list(zip(RATES, _SYMBOLS, _ROLES, _DASHES, strict=True))
        self.curves = {
            name: self.put(_curve(symbol, 7), role, role, style=style)
            for name, symbol, role, style in looks
        }
        self.curves_over = {
            name: self.put(_curve(symbol, 10), role, dashes=DASHES)
            for name, symbol, role, _ in looks
        }
        self._n = self._n_over = 0
        self.set_rates({name: [] for name in RATES})

    def set_rates(self, rates: dict[str, list[float | None]]) -> None:
        """Show the three lists of `engine.trace.timings.acceptance`, each [n_max]."""
        self._n = _show(self.curves, rates)
        self._label_indices()
        self.setAccessibleDescription(_words(rates))

    def set_overlay(self, rates: dict[str, list[float | None]] | None) -> None:
        """Show the rates of an overlaid run with hollow marks and thin dashes; None removes
        them."""
        self._n_over = _show(self.curves_over, rates or {name: [] for name in RATES})
        self._label_indices()

    def _label_indices(self) -> None:
        n = max(self._n, self._n_over)
        step = max(1, -(-n // 6))
        ticks = [(i, str(i)) for i in range(0, n, step)]
        self.getPlotItem().getAxis("bottom").setTicks([ticks])
        self.box.setRange(xRange=(-0.4, max(n - 1, 1) + 0.4), yRange=(-0.06, 1.08), padding=0)


def _curve(symbol: str, size: int) -> pg.PlotDataItem:
    return pg.PlotDataItem(symbol=symbol, symbolSize=size, connect="finite")


def _show(curves: dict[str, pg.PlotDataItem], rates: dict[str, list[float | None]]) -> int:
    """Draw three lists; returns their length."""
    for name, curve in curves.items():
        values = np.array([np.nan if v is None else v for v in rates[name]], float)
        known = np.isfinite(values)
        curve.setData(np.arange(len(values))[known], values[known])
    return len(rates[RATES[0]])


def _words(rates: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {', '.join(significant(rate) for rate in rates[name])}" for name in RATES
    )
