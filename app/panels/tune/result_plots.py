"""Plots of results: a heat map over two settings, and points with their Pareto front."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Signal

from app.looks import Theme
from app.trace_models.results import ResultColumn, Results, short_text
from app.trace_models.shown_text import significant
from app.trace_models.tune_surface import BEST, HeatMap
from app.widgets.plot_surface import PlotSurface
from engine.experiments.results.reader import ESTIMATED

MOST_CELLS = 40
"""Most values of an axis; more numbers are grouped into ranges, further words are left out."""
_DRAFT_AXES = ("spec-draft-n-max", "spec-draft-p-min")


ResultMap = tuple[HeatMap, dict[tuple[int, int], np.ndarray]]
"""A heat map, and the rows of the results in each cell, by (row, column)."""


def map_axes(results: Results) -> tuple[str, ...]:
    """The default axes of a heat map, across and up: n_max and p_min if both vary, else the two
    settings with most values, in the plan's order; fewer if fewer vary."""
    if set(_DRAFT_AXES) <= set(results.axes):
        return _DRAFT_AXES
    counts = {name: _n_values(results.column(name)) for name in results.axes}
    most = sorted(counts, key=lambda name: -counts[name])[:2]
    return tuple(name for name in results.axes if name in most)


def result_map(
    results: Results, x: ResultColumn, y: ResultColumn | None, figure: ResultColumn
) -> ResultMap:
    """The mean of a figure over the rows of each pair of values, over measured ones if others are
    estimates; the best cell is marked. y: None for a single row of cells."""
    across, column = _axis(x)
    up, row = (("",), np.zeros(results.n, np.int64)) if y is None else _axis(y)
    known = np.isfinite(figure.values) & (column >= 0) & (row >= 0)
    rows = np.flatnonzero(known)
    shape = (max(1, len(up)), max(1, len(across)))
    cell = row[rows] * shape[1] + column[rows]
    if (kinds := results.column("figures")) is not None:
        estimated = kinds.values[rows] == ESTIMATED
        stays = ~(estimated & np.isin(cell, cell[~estimated]))
        rows, cell = rows[stays], cell[stays]
    n = np.bincount(cell, minlength=shape[0] * shape[1])
    total = np.bincount(cell, figure.values[rows], shape[0] * shape[1])
    values = np.full(len(n), np.nan)
    np.divide(total, n, out=values, where=n > 0)
    order = np.argsort(cell, kind="stable")
    parts = np.split(rows[order], np.cumsum(n)[:-1])
    marks = {}
    if len(rows):
        at = int(np.nanargmin(values) if figure.is_better_low else np.nanargmax(values))
        marks[BEST] = divmod(at, shape[1])
    values = values.reshape(shape)
    texts = tuple(tuple(_text(figure, value) for value in row) for row in values.tolist())
    return (
        HeatMap(x.title, "" if y is None else y.title, across, up, values, texts, marks),
        {divmod(at, shape[1]): part for at, part in enumerate(parts) if len(part)},
    )


def front(x: ResultColumn, y: ResultColumn) -> np.ndarray:
    """Rows on the Pareto front of both figures, by x: int64 [m]."""
    rows = np.flatnonzero(np.isfinite(x.values) & np.isfinite(y.values))
    cost = x.values[rows] * (1 if x.is_better_low else -1)
    loss = y.values[rows] * (1 if y.is_better_low else -1)
    order = np.lexsort((loss, cost))
    least = np.minimum.accumulate(loss[order])
    is_front = np.r_[True, least[1:] < least[:-1]] if len(order) else np.zeros(0, bool)
    chosen: np.ndarray = rows[order[is_front]]
    return chosen[np.argsort(x.values[chosen], kind="stable")]


def _n_values(column: ResultColumn | None) -> int:
    """Number of different values, not counting rows without one."""
    if column is None:
        return 0
    values = column.values
    known = values != "" if column.is_text else np.isfinite(values)
    return len(set(values[known].tolist()))


def _axis(column: ResultColumn) -> tuple[tuple[str, ...], np.ndarray]:
    """The labels of an axis, and the index of each row, int64 [n], -1 for none."""
    if column.is_text:
        counts = Counter(column.values.tolist())
        names = sorted(name for name, _ in counts.most_common(MOST_CELLS))
        places = {name: i for i, name in enumerate(names)}
        place = np.array([places.get(name, -1) for name in column.values.tolist()], np.int64)
        return tuple(short_text(name) or "–" for name in names), place
    known = np.isfinite(column.values)
    found, at = np.unique(column.values[known], return_inverse=True)
    if len(found) <= MOST_CELLS:
        rows = [int(np.flatnonzero(column.values == value)[0]) for value in found]
        labels = [column.text(row) for row in rows]
    else:
        edges = np.linspace(found[0], found[-1], MOST_CELLS + 1)
        at = np.searchsorted(edges[:-1], column.values[known], "right") - 1
        labels = [f"≥ {significant(edge)}" for edge in edges[:-1].tolist()]
    if not known.all():  # such as plain decoding, without a draft length
        labels, at = ["–", *labels], at + 1
    place = np.zeros(len(column.values), np.int64)
    place[known] = at
    return tuple(labels), place


def _text(figure: ResultColumn, value: float) -> str:
    text = figure.said(value)
    return text if len(text) <= 8 else significant(value)


_MOST_DRAWN = 10_000
_NEAR_PIXELS = 12.0


class ParetoPlot(PlotSurface):
    """Grey dots, and a line with squares along the front; rings around the chosen rows."""

    row_chosen = Signal(int)  # of the results

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "00000 ")
        self.setAccessibleName("Results over two figures")
        self.setMinimumSize(0, 0)
        self._x: ResultColumn | None = None
        self._y: ResultColumn | None = None
        self._rows = np.zeros(0, np.int64)
        self.front: np.ndarray = np.zeros(0, np.int64)
        """Rows on the Pareto front, by x."""
        self._dots = self.put(pg.ScatterPlotItem(symbol="o", size=5), "", "plot.axis")
        line, good = pg.PlotDataItem(symbol="s", symbolSize=7), "status.ok"
        self._line = self.put(line, good, good, width=1.5)
        self._ring = self.put(pg.ScatterPlotItem(symbol="o", size=14), "plot.limit", width=2.0)
        self.tip = self._words_at
        self.clicked.connect(self._choose)

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
            # pyqtgraph's own arithmetic overflows for sizes in bytes
            drawn = _thinned(x.values[self._rows], y.values[self._rows])
            self._dots.setData(x.values[self._rows][drawn], y.values[self._rows][drawn])
            self._line.setData(x.values[self.front], y.values[self.front])
            self._set_ranges(x, y)
        self.name_axes(y.title, x.title)
        best = [f"{x.text(row)}: {y.text(row)}" for row in self.front[:20].tolist()]
        self.setAccessibleDescription(
            f"{y.title} over {x.title}, {len(self._rows):,} results; front: {', '.join(best)}"
        )

    def choose(self, rows: np.ndarray) -> None:
        """Put rings around these rows of the results."""
        if self._x is None or self._y is None:
            self._ring.setData([], [])
            return
        shown = rows[np.isfinite(self._x.values[rows]) & np.isfinite(self._y.values[rows])]
        self._ring.setData(self._x.values[shown], self._y.values[shown])

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
                [(at, column.said(at)) for at in _round_ticks(*limits, _unit(column, limits[1]))],
            )

    def nearest(self, x: float, y: float) -> int | None:
        """The row nearest to a place, None if none is near."""
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
        figures = (f"{column.title} {column.text(row)}" for column in (self._x, self._y))
        return f"row {row + 1}: {', '.join(figures)}"


def _thinned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the points to draw: if too many, one per small square."""
    if len(x) <= _MOST_DRAWN:
        return np.arange(len(x))

    def squares(values: np.ndarray) -> np.ndarray:
        low, high = values.min(), values.max()
        scaled: np.ndarray = ((values - low) / ((high - low) or 1.0) * 255).astype(np.int64)
        return scaled

    _, kept = np.unique(squares(x) * 256 + squares(y), return_index=True)
    return np.asarray(kept[:_MOST_DRAWN])


def _unit(column: ResultColumn, most: float) -> float:
    """The unit of an axis: for bytes the largest below the maximum."""
    if not column.name.endswith("_bytes") or most < 1024:
        return 1.0
    return 1024.0 ** np.floor(np.log(most) / np.log(1024.0))


def _round_ticks(low: float, high: float, of: float = 1.0) -> list[float]:
    """Two to five round ticks of a unit in a range; 0 is never -0."""
    low, high = low / of, high / of
    unit = 10.0 ** np.floor(np.log10((high - low) / 2))
    step = next(s for s in (5, 2, 1) if (high - low) / (s * unit) >= 2) * unit
    first, last = np.ceil(low / step), np.floor(high / step)
    return [float(at * step * of) + 0.0 for at in np.arange(first, last + 1)]
