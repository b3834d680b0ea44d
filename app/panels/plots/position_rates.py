"""Acceptance by index in the draft: three rates that are easily taken for each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QBrush, QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.trace_models.number_text import significant
from app.widgets.legend import Swatch
from app.widgets.line_styles import overlay_pen, plot_pen
from app.widgets.plot_surface import PlotSurface
from app.widgets.samples import draw_bar, draw_diamond, draw_triangle

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
        "conditional: accepted at this index / accepted at the index before",
        draw_diamond,
    ),
)


class PositionRates(PlotSurface):
    """Three lines over the index in the draft; an index never reached has no point."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__("0.5 0 ", parent)
        self.setAccessibleName("Acceptance by index in the draft")
        self.getPlotItem().getAxis("left").setTicks([[(0, "0"), (0.5, "0.5"), (1, "1")]])
        self.curves = {
            name: pg.PlotDataItem(symbol=symbol, symbolSize=7, connect="finite")
            for name, symbol in zip(RATES, _SYMBOLS, strict=True)
        }
        self.curves_over = {
            name: pg.PlotDataItem(symbol=symbol, symbolSize=10, connect="finite")
            for name, symbol in zip(RATES, _SYMBOLS, strict=True)
        }
        for curve in (*self.curves.values(), *self.curves_over.values()):
            self.addItem(curve)
        self._n = self._n_over = 0
        self.set_rates({name: [] for name in RATES})
        self.retheme(theme)

    def set_rates(self, rates: dict[str, list[float | None]]) -> None:
        """Show the three lists of `engine.trace.timings.acceptance`, each [n_max]."""
        self._n = _show(self.curves, rates)
        self._label_indices()
        self.setAccessibleDescription(_words(rates))

    def set_overlay(self, rates: dict[str, list[float | None]] | None) -> None:
        """Show the rates of a second run with hollow marks and thin dashes; None removes them."""
        self._n_over = _show(self.curves_over, rates or {name: [] for name in RATES})
        self._label_indices()

    def _label_indices(self) -> None:
        n = max(self._n, self._n_over)
        step = max(1, -(-n // 6))
        ticks = [(i, str(i)) for i in range(0, n, step)]
        self.getPlotItem().getAxis("bottom").setTicks([ticks])
        self.box.setRange(xRange=(-0.4, max(n - 1, 1) + 0.4), yRange=(-0.06, 1.08), padding=0)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.colour_axes(theme)
        self.name_axes("rate", "index in draft", theme)
        for curve, role, dashes in zip(self.curves.values(), _ROLES, _DASHES, strict=True):
            colour = theme.color(role)
            curve.setPen(plot_pen(colour, style=dashes))
            curve.setSymbolPen(QPen(Qt.PenStyle.NoPen))
            curve.setSymbolBrush(colour)
        for curve, role in zip(self.curves_over.values(), _ROLES, strict=True):
            curve.setPen(overlay_pen(theme.color(role)))
            curve.setSymbolPen(plot_pen(theme.color(role)))
            curve.setSymbolBrush(QBrush(Qt.BrushStyle.NoBrush))


def _show(curves: dict[str, pg.PlotDataItem], rates: dict[str, list[float | None]]) -> int:
    """Draw three lists, and give their length."""
    for name, curve in curves.items():
        values = np.array([np.nan if v is None else v for v in rates[name]], float)
        known = np.isfinite(values)
        curve.setData(np.arange(len(values))[known], values[known])
    return len(rates[RATES[0]])


def _words(rates: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}: {', '.join(significant(rate) for rate in rates[name])}" for name in RATES
    )
