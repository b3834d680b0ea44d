"""Plots of bars over rounds, and the outline of a second run's bars over them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.plots.overlaid_view import OverlaidView
from app.panels.plots.pixel_columns import PixelColumns, per_round
from app.trace_models.run_axis import RunAxis, RunOverlay
from app.trace_models.run_rows import RunRows
from app.widgets.legend import Swatch
from app.widgets.line_styles import ROLE, OverlayLine, draw_overlay


class BarView(OverlaidView):
    """The line has one step for each round of the second run, its sequences together.

    overlay_tip: what the line is, in words. sequences: what makes one value of those of the
    sequences. means: whether rounds in one column of pixels are averaged; else the largest counts.
    """

    overlay_tip: ClassVar[str]
    sequences: ClassVar[np.ufunc] = np.add
    means: ClassVar[bool] = False

    def __init__(
        self,
        theme: Theme,
        name: str,
        y_label: str,
        swatches: Sequence[Swatch],
        empty_text: str,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(theme, name, y_label, swatches, empty_text, parent)
        self._line = OverlayLine()
        self.plot.addItem(self._line, ignoreBounds=True)

    def retheme(self, theme: Theme) -> None:
        super().retheme(theme)
        self._line.retheme(theme)

    @abstractmethod
    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        """The height that each of rows start .. stop adds to the bar of its round, [n]."""

    @abstractmethod
    def _height_words(self, height: float) -> str:
        """The height of a bar in words."""

    def _decodes_prompt(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        """Which rows start .. stop decode a prompt, bool [n]; the y-axis is not scaled to them."""
        return np.zeros(stop - start, bool)

    def _rows_of(self, overlay: RunOverlay) -> RunRows:
        """The rows of a second run that the line is made of."""
        return overlay.rows()

    def _columns(
        self, axis: RunAxis, rounds: np.ndarray
    ) -> tuple[PixelColumns, np.ndarray, np.ndarray]:
        """The columns of pixels that rounds, int64 [n], fall into; the left and the right end of
        the bar in each, in units of x, float64 [bars]."""
        starts, ends = axis.starts(rounds), axis.ends(rounds)
        columns = PixelColumns(starts, *self.plot.x_range, self.plot.n_pixels)
        return columns, columns.first(starts), columns.last(ends)

    def _draw_overlay(self) -> float:
        """Draw the steps in sight; the height that they need, 0 without a second run."""
        if self._overlay is None:
            return 0.0
        axis, rows = self._overlay.axis(self.plot.run_axis.unit), self._rows_of(self._overlay)
        start, stop = rows.between(*axis.between(*self.plot.x_range))
        of_row, heights = rows.rounds.values[start:stop], self._heights(rows, start, stop)
        rounds, values = per_round(of_row, heights.astype(float), self.sequences)
        columns, x0, x1 = self._columns(axis, rounds)
        x = np.stack([x0, x1], axis=1).ravel()
        y = columns.mean(values) if self.means else columns.most(values)
        self._line.setData(x, np.repeat(y, 2))
        _, prompt = per_round(of_row, self._decodes_prompt(rows, start, stop), np.logical_or)
        return float(values[~prompt].max(initial=0.0))

    def _overlay_swatches(self, overlay: RunOverlay) -> Sequence[Swatch]:
        of_one_trace = overlay.run.store is overlay.over.store
        label = f"{overlay.name} over {overlay.over}" if of_one_trace else overlay.name
        return [Swatch(label, ROLE, f"{self.overlay_tip} of {overlay.name}", draw_overlay)]

    def _clear_overlay(self) -> None:
        self._line.setData([], [])

    def _overlay_words(self, overlay: RunOverlay, round_: int) -> str:
        rows = self._rows_of(overlay)
        start, stop = rows.between(round_, round_ + 1)
        if start == stop:
            return ""
        return self._height_words(float(self.sequences.reduce(self._heights(rows, start, stop))))
