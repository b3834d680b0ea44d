"""Estimated speed over the longest draft, the best and the recorded one marked."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QBrush, QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.widgets.line_styles import plot_pen
from app.widgets.plot_surface import PlotSurface
from engine.analysis.what_if.by_length import WhatIf


class SpeedPlot(PlotSurface):
    """A line of tokens per second; a star is the best n_max, a ring the one that was recorded."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__("0000 ", parent)
        self.setAccessibleName("Estimated speed by n_max")
        self.setMinimumHeight(2 * self.fontMetrics().height())
        self._line = pg.PlotDataItem(symbol="o", symbolSize=4)
        self._recorded = pg.ScatterPlotItem(symbol="o", size=12)
        self._best = pg.ScatterPlotItem(symbol="star", size=14)
        for item in (self._line, self._recorded, self._best):
            self.addItem(item)
        self.retheme(theme)

    def set_estimates(self, result: WhatIf | None) -> None:
        """Show the estimates; nothing where the run was not timed."""
        best = None if result is None else result.best
        if result is None or best is None:
            for item in (self._line, self._recorded, self._best):
                item.setData([], [])
            return
        speeds = np.array([e.tokens_per_second or 0.0 for e in result.estimates])
        n_max = np.arange(len(speeds))
        self._line.setData(n_max, speeds)
        self._recorded.setData([n_max[-1]], [speeds[-1]])
        self._best.setData([best.n_max], [speeds[best.n_max]])
        step = max(1, -(-len(speeds) // 8))
        ticks = [(int(k), str(k)) for k in n_max[::step]]
        self.getPlotItem().getAxis("bottom").setTicks([ticks])
        self.box.setRange(xRange=(-0.4, n_max[-1] + 0.4), yRange=(0, speeds.max() * 1.2), padding=0)
        self.setAccessibleDescription(
            ", ".join(f"n_max {k}: {speed:.3g} tokens/s" for k, speed in enumerate(speeds))
        )

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.colour_axes(theme)
        self.name_axes("tok/s", "n_max", theme)
        self._line.setPen(plot_pen(theme.color("ui.accent")))
        self._line.setSymbolPen(QPen(Qt.PenStyle.NoPen))
        self._line.setSymbolBrush(theme.color("ui.accent"))
        self._recorded.setPen(plot_pen(theme.color("plot.text"), 1.5))
        self._recorded.setBrush(QBrush(Qt.BrushStyle.NoBrush))
        self._best.setPen(QPen(Qt.PenStyle.NoPen))
        self._best.setBrush(theme.color("plot.limit"))
