"""How many attention cells are in use, and how many positions are held twice."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.plots.bar_view import BarView, StackedBars, per_round, sample
from app.trace_models.number_text import whole_text
from app.trace_models.run_rows import RunRows
from app.widgets.legend import Swatch
from app.widgets.line_styles import draw_triangle
from app.widgets.plot_surface import draw_nothing
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

_COLUMNS = ("kv_cells_used", "kv_cells_duplicate")
_ROLES = ("phase.save", "status.warning")
_PATTERNS = (Qt.BrushStyle.SolidPattern, Qt.BrushStyle.BDiagPattern)
_SIGN_PIXELS = 8


class KvCellsView(BarView):
    """Bars of cells in use after each round, all its sequences together, duplicates on top; a
    triangle wherever there are any, however few."""

    widest_label = "duplicates"
    untold = "how many attention cells are in use"
    overlay_tip = "Cells in use after each round, duplicates too,"

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(
            theme,
            "KV cells",
            "cells",
            (
                Swatch("duplicates", _ROLES[1], "Cells beyond one per position", draw_triangle),
                Swatch(
                    "used", _ROLES[0], "Cells with a position of their own", sample(_PATTERNS[0])
                ),
            ),
            "Shows how many attention cells the sequences use. Press Run (F5).",
            parent,
        )
        self._bars = StackedBars(len(_COLUMNS))
        self._signs = pg.ScatterPlotItem(symbol="t", size=_SIGN_PIXELS)
        for item in (*self._bars.items, self._signs):
            self.plot.addItem(item, ignoreBounds=True)
        self._reset()
        self.retheme(theme)

    def _reset(self) -> None:
        self._rows: RunRows | None = None
        self._most = self._most_duplicates = -1
        self._bars.clear()
        draw_nothing(self._signs)

    def _read(self, run: RunRef) -> int | None:
        if self._rows is None:
            self._rows = RunRows(run, "rounds")
        start, stop = self._rows.read()
        if start == stop:
            return None
        used, duplicates = (self._rows.column(name, start, stop) for name in _COLUMNS)
        if self._most < 0 and (used == MISSING).all():
            return None
        self._most = max(self._most, int(used.max()))
        self._most_duplicates = max(self._most_duplicates, int(duplicates.max()))
        return int(self._rows.rounds.values[-1]) + 1

    def _draw(self) -> None:
        if self._rows is None:
            return
        start, stop = self._rows.between(*self.plot.rounds_in_sight)
        counts = np.stack([np.maximum(self._rows.column(n, start, stop), 0) for n in _COLUMNS])
        rounds, counts = per_round(self._rows.rounds.values[start:stop], counts, np.add)
        columns, x0, x1 = self._columns(self.plot.run_axis, rounds)
        used, twice = columns.most(counts)
        parts = np.stack([np.maximum(used - twice, 0), twice])
        self._bars.set(x0, x1, parts, self.plot.pixel)
        top = max(float(used.max(initial=1)), self._draw_overlay())
        some = twice > 0
        self._signs.setData(((x0 + x1) / 2)[some], used[some] + 0.08 * top)
        self.plot.set_y_range(0, top * 1.2)

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        return np.maximum(rows.column(_COLUMNS[0], start, stop), 0)

    def _height_words(self, height: float) -> str:
        return f"{height:,.0f} cells in all"

    def _recolour(self, theme: Theme) -> None:
        self._bars.recolour([theme.color(role) for role in _ROLES], _PATTERNS)
        self._signs.setBrush(theme.color(_ROLES[1]))
        self._signs.setPen(QPen(Qt.PenStyle.NoPen))

    def _tip(self, x: float, _y: float) -> str:
        round_ = self.plot.run_axis.round_at(x)
        start, stop = (0, 0) if self._rows is None else self._rows.between(round_, round_ + 1)
        lines = [self.plot.run_axis.text(round_)]
        for at in range(start, stop):
            assert self._rows is not None
            row = self._rows.row(at)
            used, duplicates = (whole_text(row[name]) for name in _COLUMNS)
            lines.append(f"sequence {row['seq_id']}: {used} cells, {duplicates} duplicates")
        return "\n".join(lines) if start < stop else ""

    def table(self) -> tuple[list[str], list[list[object]]]:
        assert self._rows is not None
        names = ["round", "seq_id", *_COLUMNS, "attention_pos_max"]
        return names, self._rows.listed(names, *self.plot.rounds_in_sight)

    def _summary(self) -> str:
        return (
            f"rounds: {self.plot.n_rounds}, most cells of a sequence: {max(self._most, 0)}, "
            f"most duplicates: {max(self._most_duplicates, 0)}"
        )
