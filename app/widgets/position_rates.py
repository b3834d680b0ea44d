"""Acceptance by index in the draft: three rates that are easily taken for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QPen
from PySide6.QtWidgets import QFrame, QWidget

from app.models.live_numbers import significant
from app.theme import Theme
from app.widgets.legend import Swatch
from app.widgets.samples import draw_bar, draw_diamond, draw_triangle

RATES = ("unconditional", "unconditional_given_drafted", "conditional")
_SYMBOLS = ("s", "t", "d")
_ROLES = ("lane.first", "lane.second", "lane.third")
_DASHES = (Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine, Qt.PenStyle.DotLine)
SWATCHES = (
    Swatch(
        "unconditional", _ROLES[0],
        "unconditional: accepted at this index / all steps", draw_bar,
    ),
    Swatch(
        "given drafted", _ROLES[1],
        "unconditional_given_drafted: accepted at this index / steps that drafted so far",
        draw_triangle,
    ),
    Swatch(
        "conditional", _ROLES[2],
        "conditional: accepted at this index / accepted at the index before", draw_diamond,
    ),
)  # fmt: skip


class PositionRates(pg.PlotWidget):
    """Three lines over the index in the draft; an index never reached has no point."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAccessibleName("Acceptance by index in the draft")
        plot = self.getPlotItem()
        plot.setMenuEnabled(False)
        plot.hideButtons()
        plot.getViewBox().setMouseEnabled(x=False, y=False)
        metrics = self.fontMetrics()
        plot.getAxis("left").setWidth(metrics.horizontalAdvance("0.5 ") + 2 * metrics.height())
        plot.getAxis("left").setTicks([[(0, "0"), (0.5, "0.5"), (1, "1")]])
        plot.getAxis("bottom").setHeight(2 * metrics.height() + 4)
        self.curves = {
            name: pg.PlotDataItem(symbol=symbol, symbolSize=7, connect="finite")
            for name, symbol in zip(RATES, _SYMBOLS, strict=True)
        }
        for curve in self.curves.values():
            plot.addItem(curve)
        self._n = 0
        self.set_rates({name: [] for name in RATES})
        self.retheme(theme)

    def set_rates(self, rates: dict[str, list[float | None]]) -> None:
        """Show the three lists of `engine.trace.timings.acceptance`, each [n_max]."""
        n = len(rates[RATES[0]])
        for name, curve in self.curves.items():
            values = np.array([np.nan if v is None else v for v in rates[name]], float)
            known = np.isfinite(values)
            curve.setData(np.arange(n)[known], values[known])
        if n != self._n:
            self._n = n
            step = max(1, -(-n // 6))
            ticks = [(i, str(i)) for i in range(0, n, step)]
            self.getPlotItem().getAxis("bottom").setTicks([ticks])
        self.getPlotItem().getViewBox().setRange(
            xRange=(-0.4, max(n - 1, 1) + 0.4), yRange=(-0.06, 1.08), padding=0
        )
        self.setAccessibleDescription(_words(rates))

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.setBackground(theme.color("plot.background"))
        for side, label in (("left", "rate"), ("bottom", "index in draft")):
            axis = self.getPlotItem().getAxis(side)
            axis.setPen(QPen(theme.color("plot.axis")))
            axis.setTickPen(QPen(theme.color("plot.axis")))
            axis.setStyle(tickLength=3)
            axis.enableAutoSIPrefix(False)
            axis.setTextPen(theme.color("plot.text"))
            axis.setLabel(label, color=theme.color("plot.text").name())
        for curve, role, dashes in zip(self.curves.values(), _ROLES, _DASHES, strict=True):
            colour = theme.color(role)
            pen = QPen(colour, 1.0, dashes)
            pen.setCosmetic(True)
            curve.setPen(pen)
            curve.setSymbolPen(QPen(Qt.PenStyle.NoPen))
            curve.setSymbolBrush(colour)


def _words(rates: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {', '.join(significant(rate) for rate in rates[name])}" for name in RATES
    )
