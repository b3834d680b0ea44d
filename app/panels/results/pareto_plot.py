"""Results as points over two figures, with those that none beats in both."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QBrush, QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.results.result_plots import front
from app.trace_models.results import ResultColumn
from app.widgets.line_styles import plot_pen
from app.widgets.plot_surface import PlotSurface

_MOST_DRAWN = 10_000
_NEAR_PIXELS = 12.0


class ParetoPlot(PlotSurface):
    """Grey dots, and a line with squares through the front; a ring around the chosen rows."""

    row_chosen = Signal(int)  # of the results

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__("00000 ", parent)
        self.setAccessibleName("Results over two figures")
        self.setMinimumSize(0, 0)
        self._theme = theme
        self._x: ResultColumn | None = None
        self._y: ResultColumn | None = None
        self._rows = np.zeros(0, np.int64)
        self.front: np.ndarray = np.zeros(0, np.int64)
        """Rows that no other beats in both figures, by x."""
        self._dots = pg.ScatterPlotItem(symbol="o", size=5)
        self._line = pg.PlotDataItem(symbol="s", symbolSize=7)
        self._ring = pg.ScatterPlotItem(symbol="o", size=14)
        for item in (self._dots, self._line, self._ring):
            self.addItem(item)
        self.tip = self._words_at
        self.clicked.connect(self._choose)
        self.retheme(theme)

    def set_figures(self, x: ResultColumn | None, y: ResultColumn | None) -> None:
        """Show these figures of all rows, or nothing."""
        self._x, self._y = x, y
        self.choose(np.zeros(0, np.int64))
        if x is None or y is None:
            self._rows = self.front = np.zeros(0, np.int64)
            self._dots.setData([], [])
            self._line.setData([], [])
            return
        self._rows = np.flatnonzero(np.isfinite(x.values) & np.isfinite(y.values))
        self.front = front(x, y)
        if len(self._rows):
            # sizes in bytes are larger than some of pyqtgraph's own figures can be
            drawn = _thinned(x.values[self._rows], y.values[self._rows])
            self._dots.setData(x.values[self._rows][drawn], y.values[self._rows][drawn])
            self._line.setData(x.values[self.front], y.values[self.front])
            self._set_ranges(x, y)
        self.name_axes(y.title, x.title, self._theme)
        best = [f"{x.text(row)}: {y.text(row)}" for row in self.front[:20].tolist()]
        self.setAccessibleDescription(
            f"{y.title} over {x.title}, {len(self._rows):,} results; front: {', '.join(best)}"
        )

    def choose(self, rows: np.ndarray) -> None:
        """Put a ring around these rows of the results."""
        if self._x is None or self._y is None:
            self._ring.setData([], [])
            return
        shown = rows[np.isfinite(self._x.values[rows]) & np.isfinite(self._y.values[rows])]
        self._ring.setData(self._x.values[shown], self._y.values[shown])

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self.colour_axes(theme)
        if self._x is not None and self._y is not None:
            self.name_axes(self._y.title, self._x.title, theme)
        self._dots.setPen(QPen(Qt.PenStyle.NoPen))
        self._dots.setBrush(theme.color("plot.axis"))
        self._line.setPen(plot_pen(theme.color("status.ok"), 1.5))
        self._line.setSymbolPen(QPen(Qt.PenStyle.NoPen))
        self._line.setSymbolBrush(theme.color("status.ok"))
        self._ring.setPen(plot_pen(theme.color("plot.limit"), 2.0))
        self._ring.setBrush(QBrush(Qt.BrushStyle.NoBrush))

    def _set_ranges(self, x: ResultColumn, y: ResultColumn) -> None:
        ranges = []
        for column in (x, y):
            values = column.values[self._rows]
            low, high = float(values.min()), float(values.max())
            pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
            ranges.append((low - pad, high + pad))
        self.box.setRange(xRange=ranges[0], yRange=ranges[1], padding=0)
        for side, column, limits in zip(("bottom", "left"), (x, y), ranges, strict=True):
            self.set_ticks(
                side,
                [
                    (at, _label(column, at))
                    for at in _round_ticks(*limits, _unit(column, limits[1]))
                ],
            )

    def nearest(self, x: float, y: float) -> int | None:
        """The row nearest to a place, None where none is near."""
        if self._x is None or self._y is None or not len(self._rows):
            return None
        wide, high = self.box.viewPixelSize()
        away = np.hypot(
            (self._x.values[self._rows] - x) / wide, (self._y.values[self._rows] - y) / high
        )
        at = int(away.argmin())
        return int(self._rows[at]) if away[at] <= _NEAR_PIXELS else None

    def _choose(self, x: float, y: float) -> None:
        row = self.nearest(x, y)
        if row is not None:
            self.row_chosen.emit(row)

    def _words_at(self, x: float, y: float) -> str:
        row = self.nearest(x, y)
        if row is None or self._x is None or self._y is None:
            return ""
        return f"row {row + 1}: {_figure(self._x, row)}, {_figure(self._y, row)}"


def _thinned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the points to draw: of too many, one for each small square."""
    if len(x) <= _MOST_DRAWN:
        return np.arange(len(x))

    def squares(values: np.ndarray) -> np.ndarray:
        low, high = values.min(), values.max()
        scaled: np.ndarray = ((values - low) / ((high - low) or 1.0) * 255).astype(np.int64)
        return scaled

    _, kept = np.unique(squares(x) * 256 + squares(y), return_index=True)
    return np.asarray(kept[:_MOST_DRAWN])


def _unit(column: ResultColumn, most: float) -> float:
    """The unit of an axis: bytes in the largest unit below the most."""
    if not column.name.endswith("_bytes") or most < 1024:
        return 1.0
    return 1024.0 ** np.floor(np.log(most) / np.log(1024.0))


def _round_ticks(low: float, high: float, of: float = 1.0) -> list[float]:
    """Two to five round numbers of a unit between two others; 0 is never -0."""
    low, high = low / of, high / of
    unit = 10.0 ** np.floor(np.log10((high - low) / 2))
    step = next(s for s in (5, 2, 1) if (high - low) / (s * unit) >= 2) * unit
    first, last = np.ceil(low / step), np.floor(high / step)
    return [float(at * step * of) + 0.0 for at in np.arange(first, last + 1)]


def _label(column: ResultColumn, value: float) -> str:
    one = ResultColumn(column.name, "", "", np.array([value]), is_figure=True)
    return one.text(0)


def _figure(column: ResultColumn, row: int) -> str:
    return f"{column.title} {column.text(row)}"
