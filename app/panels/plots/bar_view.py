"""Bar plots over rounds, stacked by kind and reduced to pixel columns, with the lines, legend and
readout of an overlaid run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QBrush, QColor, QPainter

from app.looks import Theme
from app.panels.plots.round_view import RoundView
from app.trace_models.run_notes import run_name
from app.trace_models.run_rows import RunAxis, RunOverlay, RunRows
from app.widgets.legend import Swatch
from app.widgets.line_styles import OVERLAYS, overlay_sample
from app.widgets.plot_surface import PlotSurface


class OverlaidView(RoundView):
    """A RoundView that can have an overlay. The overlaid run is read when it is drawn: while
    hidden, nothing is computed."""

    overlay: RunOverlay | None = None
    """The second run, drawn over the one on show; None without one."""
    _n_drawn = 0
    """Rows of the overlaid run when it was last drawn."""

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        self.overlay, self._n_drawn = overlay, 0
        self._clear_overlay()
        self.legend.set_leading([] if overlay is None else self._overlay_swatches(overlay))
        self._fit_legend()
        self._redraw()
        if self.has_rounds:
            self.plot.setAccessibleDescription(self._words())

    def refresh(self) -> None:
        super().refresh()
        if self.overlay is None or self._stale or not self.has_rounds:
            return
        if self.visibleRegion().isEmpty() or _n_rows(self.overlay) != self._n_drawn:
            self._redraw()

    def readout(self, x: float, y: float) -> str:
        own = super().readout(x, y)
        if self.overlay is None:
            return own
        parts = [f"{run_name(self.overlay.over)}, {own}"] if own else []
        for overlay in self.overlay.every:
            axis = overlay.axis(self.plot.run_axis.unit)
            round_ = axis.round_at(x)
            if words := self._overlay_words(overlay, round_):
                parts.append(f"{overlay.name}, {axis.text(round_)}\n{words}")
        return "\n".join(parts)

    @abstractmethod
    def _overlay_swatches(self, overlay: RunOverlay) -> Sequence[Swatch]:
        """Legend entries of the second run's lines."""

    @abstractmethod
    def _clear_overlay(self) -> None:
        """Drop all data of the overlaid run."""

    @abstractmethod
    def _overlay_words(self, overlay: RunOverlay, round_: int) -> str:
        """The overlaid run's values in a round, empty if it does not have the round."""

    def _words(self) -> str:
        own = super()._words()
        names = [one.name for one in self.overlay.every] if self.overlay else []
        return f"{own}, overlaid: {', '.join(names)}" if names else own

    def _redraw(self) -> None:
        super()._redraw()
        if self.overlay is not None and not self._stale:
            self._n_drawn = _n_rows(self.overlay)


def _n_rows(overlay: RunOverlay) -> int:
    return sum(len(one.rows()) for one in overlay.every)


class BarView(OverlaidView):
    """The line has one step per round of the overlaid run, its sequences combined.

    overlay_tip: meaning of the line. sequences: the ufunc that combines the sequences' values.
    means: whether rounds in one pixel column are averaged; else the largest counts.
    """

    overlay_tip: ClassVar[str]
    sequences: ClassVar[np.ufunc] = np.add
    means: ClassVar[bool] = False

    def __init__(self, theme: Theme, swatches: Sequence[Swatch]) -> None:
        super().__init__(theme, swatches)
        self._lines = tuple(overlay_line(self.plot, *style) for style in OVERLAYS)

    @abstractmethod
    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        """The height that each of rows start .. stop adds to its round's bar, [n]."""

    @abstractmethod
    def _height_words(self, height: float) -> str:
        """The height of a bar in words."""

    def _decodes_prompt(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        """Which rows start .. stop decode a prompt, bool [n]; the y-axis is not scaled to them."""
        return np.zeros(stop - start, bool)

    def _rows_of(self, overlay: RunOverlay) -> RunRows:
        """The overlaid run's rows for its line."""
        return overlay.rows()

    def _columns(
        self, axis: RunAxis, rounds: np.ndarray
    ) -> tuple[PixelColumns, np.ndarray, np.ndarray]:
        """The pixel columns of rounds, int64 [n]; left and right end of the bar in each, in units
        of x, float64 [bars]."""
        starts, ends = axis.starts(rounds), axis.ends(rounds)
        columns = PixelColumns(starts, *self.plot.x_range, self.plot.n_pixels)
        return columns, columns.first(starts), columns.last(ends)

    def _draw_overlay(self) -> float:
        """Draw the steps in sight; returns the height that they need, 0 without an overlay."""
        every = self.overlay.every if self.overlay is not None else ()
        lines = zip(self._lines, every, strict=False)
        return max((self._draw_line(line, one) for line, one in lines), default=0.0)

    def _draw_line(self, line: pg.PlotCurveItem, overlay: RunOverlay) -> float:
        axis, rows = overlay.axis(self.plot.run_axis.unit), self._rows_of(overlay)
        start, stop = rows.between(*axis.between(*self.plot.x_range))
        of_row, heights = rows.rounds.values[start:stop], self._heights(rows, start, stop)
        rounds, values = per_round(of_row, heights.astype(float), self.sequences)
        columns, x0, x1 = self._columns(axis, rounds)
        x = np.stack([x0, x1], axis=1).ravel()
        y = columns.mean(values) if self.means else columns.most(values)
        line.setData(x, np.repeat(y, 2))
        _, prompt = per_round(of_row, self._decodes_prompt(rows, start, stop), np.logical_or)
        return float(values[~prompt].max(initial=0.0))

    def _overlay_swatches(self, overlay: RunOverlay) -> Sequence[Swatch]:
        return [
            Swatch(one.name, role, f"{self.overlay_tip} of {one.name}", overlay_sample(dashes))
            for one, (role, dashes) in zip(overlay.every, OVERLAYS, strict=False)
        ]

    def _clear_overlay(self) -> None:
        for line in self._lines:
            line.setData([], [])

    def _overlay_words(self, overlay: RunOverlay, round_: int) -> str:
        rows = self._rows_of(overlay)
        start, stop = rows.between(round_, round_ + 1)
        if start == stop:
            return ""
        return self._height_words(float(self.sequences.reduce(self._heights(rows, start, stop))))


_CASING, _ABOVE_BARS = 3.0, 10


def overlay_line(
    plot: PlotSurface, role: str, dashes: Sequence[float], *, cased: bool = True
) -> pg.PlotCurveItem:
    """A line of another run, above bars and below the cursor. cased: with an outline against the
    bars below it; the outline would hide lines below it."""
    line = plot.put(pg.PlotCurveItem(), role, dashes=dashes, casing=_CASING * cased)
    line.setZValue(_ABOVE_BARS)
    return line


_GAPS_FROM_PIXELS = 5.0
"""Bars from this width on have a gap between them."""
_GAP = 0.14


class StackedBars:
    """At most one bar per pixel column. roles, patterns: of the parts, from the bottom."""

    def __init__(
        self, plot: PlotSurface, roles: Sequence[str], patterns: Sequence[Qt.BrushStyle]
    ) -> None:
        none = np.zeros(0)
        self.items = [
            plot.put(
                pg.BarGraphItem(x0=none, x1=none, y0=none, height=none), "", role, pattern=pattern
            )
            for role, pattern in zip(roles, patterns, strict=True)
        ]
        self.n_bars = 0

    def set(self, x0: np.ndarray, x1: np.ndarray, heights: np.ndarray, pixel: float) -> None:
        """Draw bars x0..x1, [n], of parts [n_parts, n], from the bottom. pixel: the width of one
        pixel in units of x."""
        self.n_bars = len(x0)
        if self.n_bars and float(np.median(x1 - x0)) >= _GAPS_FROM_PIXELS * pixel:
            gap = (x1 - x0) * (_GAP / 2)
            x0, x1 = x0 + gap, x1 - gap
        tops = np.cumsum(heights, axis=0)
        for item, height, top in zip(self.items, heights, tops, strict=True):
            some = height > 0
            item.setOpts(x0=x0[some], x1=x1[some], y0=(top - height)[some], height=height[some])

    def clear(self) -> None:
        if not self.n_bars:
            return
        none = np.zeros(0)
        self.set(none, none, np.zeros((len(self.items), 0)), 1.0)


def sample(pattern: Qt.BrushStyle) -> Callable[[QPainter, QRect, QColor], None]:
    """A function that paints a sample of this fill pattern into a legend."""

    def draw(painter: QPainter, box: QRect, colour: QColor) -> None:
        painter.fillRect(box, QBrush(colour, pattern))
        if pattern is not Qt.BrushStyle.SolidPattern:
            painter.setPen(colour)
            painter.drawRect(box.adjusted(0, 0, -1, -1))

    return draw


class PixelColumns:
    """Groups of neighbours that share a pixel column; each value its own group if all fit.

    x: positions of the values, ascending in each of `strips`, float64 [n]; strips: ascending
    numbers, int64 [n], or one for all; left, right: ends of the visible range; n_pixels: columns in
    it. starts: first value of each group, int64 [groups].
    """

    def __init__(
        self, x: np.ndarray, left: float, right: float, n_pixels: int, strips: np.ndarray | int = 0
    ) -> None:
        self.n = len(x)
        if self.n <= n_pixels:
            self.starts = np.arange(self.n)
            return
        place = np.floor((x - left) * (n_pixels / (right - left)))
        place = np.clip(place, 0, n_pixels - 1) + strips * n_pixels
        self.starts = np.flatnonzero(np.diff(place, prepend=-1.0))

    @property
    def is_exact(self) -> bool:
        """Whether every value has a group of its own."""
        return len(self.starts) == self.n

    def first(self, values: np.ndarray) -> np.ndarray:
        return values[..., self.starts]

    def last(self, values: np.ndarray) -> np.ndarray:
        if self.is_exact:
            return values
        stops = np.append(self.starts[1:], self.n)
        return values[..., stops - 1]

    def most(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(np.maximum, values)

    def least(self, values: np.ndarray) -> np.ndarray:
        return self._reduce(np.minimum, values)

    def mean(self, values: np.ndarray) -> np.ndarray:
        if self.is_exact:
            return values
        sums = self._reduce(np.add, values)
        return sums / np.diff(np.append(self.starts, self.n))

    def _reduce(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
        if self.is_exact:
            return values
        reduced: np.ndarray = how.reduceat(values, self.starts, axis=-1)
        return reduced


def envelope(
    x: np.ndarray, y: np.ndarray, left: float, right: float, n_pixels: int
) -> tuple[np.ndarray, np.ndarray]:
    """A line of at most n_pixels points with the same peaks: minimum and maximum of each column."""
    if len(x) <= n_pixels:
        return x, y
    columns = PixelColumns(x, left, right, max(1, n_pixels // 2))
    both = np.stack([columns.least(y), columns.most(y)], axis=1)
    return np.repeat(columns.first(x), 2), both.ravel()


def per_round(
    rounds: np.ndarray, values: np.ndarray, how: np.ufunc
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of rows, int64 [n] ascending, and values, [..., n]: each round once, [rounds], and its
    rows' values reduced by `how`, [..., rounds]."""
    numbers, firsts = np.unique(rounds, return_index=True)
    if not len(numbers):
        return numbers, values
    return numbers, how.reduceat(values, firsts, axis=-1)
