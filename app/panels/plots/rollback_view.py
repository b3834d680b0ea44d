"""How deep each round rolled back, by which path, against what n_rs_seq allows."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QBrush, QPen
from PySide6.QtWidgets import QWidget

from app.looks.theme import Theme
from app.panels.plots.bar_view import BarView, PixelColumns
from app.trace_models.number_text import whole_text
from app.trace_models.run_rows import RunRows
from app.widgets.legend import Swatch
from app.widgets.line_styles import (
    draw_bar,
    draw_cross,
    draw_dashes,
    draw_hatched,
    draw_hollow,
    plot_pen,
)
from app.widgets.plot_surface import draw_nothing
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

_COLUMNS = ("round", "seq_id", "rollback_depth", "n_rs_seq")
_GROUPS = ("seq_rm", "restore", "refused", "untold")
_GROUP_OF_PATH = {"seq_rm": 0, "restore": 1, "restore_depth": 1, "refused": 2}
_UNTOLD = 3
"""A draft was judged, and the engine did not report what became of memory after it."""
_NO_GROUP = -1
_BAR_WIDTH = 0.8
_STUB = 0.15
"""Height of a bar for a restore or refusal that undid nothing, or where nothing is reported."""


_SWATCHES = (
    Swatch("n_rs_seq", "plot.limit", "Deepest rollback the snapshot planes allow", draw_dashes),
    Swatch("seq_rm", "path.seq_rm", "Tokens removed, a snapshot plane read instead", draw_bar),
    Swatch(
        "restore",
        "path.restore",
        "Checkpoint restored, the accepted tokens decoded again",
        draw_hatched,
    ),
    Swatch("refused", "path.refused", "The memory could not roll back", draw_cross),
)
_UNTOLD_SWATCH = Swatch(
    "not observed",
    "path.untold",
    "The engine does not report whether or how it rolled back",
    draw_hollow,
)


class RollbackView(BarView):
    """Bars of rollback depth, side by side for sequences, and the dashed n_rs_seq line."""

    overlay_tip = "Deepest rollback of each round"
    sequences = np.maximum

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(
            theme,
            "Rollback depth",
            "depth",
            _SWATCHES,
            "Shows how deep each round rolled back and by which path. Press Run (F5).",
            parent,
        )
        self._bars = {
            group: pg.BarGraphItem(x=np.zeros(0), height=np.zeros(0), width=1.0)
            for group in _GROUPS
        }
        self._crosses = pg.ScatterPlotItem(symbol="x", size=9)
        self._limit = pg.InfiniteLine(angle=0, movable=False)
        self._limit.hide()
        for item in (*self._bars.values(), self._crosses, self._limit):
            self.plot.addItem(item, ignoreBounds=True)
        self._reset()
        self.retheme(theme)

    def _reset(self) -> None:
        self._next_row = 0
        self._data = {name: array("q") for name in (*_COLUMNS, "group", "row")}
        self._seq_ids: list[int] = []
        self._counts = dict.fromkeys(_GROUPS, 0)
        self._deepest = 0
        self._n_rs_seq: int | None = None
        none = np.zeros(0)
        for bars in self._bars.values():
            bars.setOpts(x=none, height=none, width=none)
        draw_nothing(self._crosses)
        self._limit.hide()
        self._show_behind([])

    def _read(self, run: RunRef) -> int | None:
        table = run.store.rounds
        start, stop = self._next_row, len(table)
        self._next_row = stop
        rows = start + np.flatnonzero(table.column("run_id", start, stop) == run.run_id)
        if not len(rows):
            return None
        new = {name: table.column(name, 0, stop)[rows] for name in _COLUMNS}
        paths = table.texts("rollback_path", start, stop)
        drafted = table.column("num_draft_tokens", 0, stop)
        groups = [
            _GROUP_OF_PATH.get(path, _NO_GROUP) if path or drafted[row] <= 0 else _UNTOLD
            for row, path in ((row, paths[row - start]) for row in rows.tolist())
        ]
        for name, values in new.items():
            self._data[name].frombytes(values.tobytes())
        self._data["row"].frombytes(rows.tobytes())
        self._data["group"].extend(groups)

        self._seq_ids = sorted({*self._seq_ids, *np.unique(new["seq_id"]).tolist()})
        self._deepest = max(self._deepest, int(new["rollback_depth"].max()))
        for number, group in enumerate(_GROUPS):
            self._counts[group] += groups.count(number)
        if self._counts["untold"]:
            self._show_behind([_UNTOLD_SWATCH])
        limits = new["n_rs_seq"][new["n_rs_seq"] != MISSING]
        if len(limits):
            self._n_rs_seq = int(limits[-1])
        return self._data["round"][-1] + 1

    def _draw(self) -> None:
        first, stop = self._rows_in_sight()
        rounds, seq_ids, depths, groups = (
            np.array(self._data[name][first:stop], np.int64)
            for name in ("round", "seq_id", "rollback_depth", "group")
        )
        axis, n_pixels = self.plot.run_axis, self.plot.n_pixels
        starts, ends = axis.starts(rounds), axis.ends(rounds)
        n_lanes = max(1, len(self._seq_ids))
        width = (ends - starts) * (_BAR_WIDTH / n_lanes)
        lane = np.searchsorted(self._seq_ids, seq_ids)
        x = (starts + ends) / 2 + (lane + 0.5 - n_lanes / 2) * width
        for number, (group, bars) in enumerate(self._bars.items()):
            at = groups == number
            if not at.any() and not len(bars.opts["x"]):
                continue  # pyqtgraph works for no bars too
            height = np.maximum(depths[at], 0.0 if group == "seq_rm" else _STUB)
            columns = PixelColumns(x[at], *self.plot.x_range, n_pixels)
            middle, height = columns.first(x[at]), columns.most(height)
            bars.setOpts(x=middle, height=height, width=columns.first(width[at]))
            if group == "refused":
                self._crosses.setData(middle, height + 0.3)
        self._draw_limit(round(self._draw_overlay()))

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        return np.maximum(rows.column("rollback_depth", start, stop), 0)

    def _height_words(self, height: float) -> str:
        return f"deepest rollback {height:.0f}"

    def _rows_in_sight(self) -> tuple[int, int]:
        first, stop = (bisect_left(self._data["round"], at) for at in self.plot.rounds_in_sight)
        return first, stop

    def table(self) -> tuple[list[str], list[list[object]]]:
        names = ["round", "seq_id", "rollback_depth", "rollback_path", "n_rs_seq"]
        first, stop = self._rows_in_sight()
        assert self._run is not None
        rows = [self._run.store.rounds.row(at) for at in self._data["row"][first:stop]]
        return names, [[row[name] for name in names] for row in rows]

    def _draw_limit(self, overlaid: int) -> None:
        """The dashed line, and a y-axis with room for it, all bars, and depths of a second run."""
        limit = self._n_rs_seq
        self._limit.setVisible(limit is not None)
        if limit is not None:
            self._limit.setValue(limit)
        self.legend.set_label(0, "n_rs_seq" if limit is None else f"n_rs_seq = {limit}")
        top = max(self._deepest, overlaid, limit or 0, 1)
        height = top * 1.25 + 0.35
        self.plot.set_y_range(0, height)
        label = self.plot.fontMetrics().height() * height / max(1.0, self.plot.box.height())
        step = max(-(-top // 4), math.ceil(label))
        ticks = [(value, str(value)) for value in range(0, top + 1, step)]
        self.plot.set_ticks("left", ticks)

    def _recolour(self, theme: Theme) -> None:
        blue, orange, red, grey = (theme.color(f"path.{group}") for group in _GROUPS)
        self._bars["seq_rm"].setOpts(brush=blue, pen=QPen(Qt.PenStyle.NoPen))
        self._bars["restore"].setOpts(
            brush=QBrush(orange, Qt.BrushStyle.BDiagPattern), pen=plot_pen(orange)
        )
        self._bars["refused"].setOpts(brush=QBrush(Qt.BrushStyle.NoBrush), pen=plot_pen(red))
        dotted = plot_pen(grey, style=Qt.PenStyle.DotLine)
        self._bars["untold"].setOpts(brush=QBrush(Qt.BrushStyle.NoBrush), pen=dotted)
        self._crosses.setPen(plot_pen(red, 2.0))
        self._crosses.setBrush(red)
        self._limit.setPen(plot_pen(theme.color("plot.limit"), style=Qt.PenStyle.DashLine))

    def _row_at(self, round_: int, seq_id: int | None) -> int | None:
        rounds, seq_ids = self._data["round"], self._data["seq_id"]
        for at in range(bisect_left(rounds, round_), bisect_right(rounds, round_)):
            if seq_ids[at] == seq_id:
                return self._data["row"][at]
        return None

    def _tip(self, x: float, y: float) -> str:
        round_ = self.plot.run_axis.round_at(x)
        row = self._row_at(round_, self._seq_at(x, y))
        if row is None or self._run is None:
            return ""
        found = self._run.store.rounds.row(row)
        lines = [f"round {round_} · sequence {found['seq_id']}"]
        path, depth = found["rollback_path"], found["rollback_depth"]
        drafted = found["num_draft_tokens"]
        if path and path != "none":
            lines.append(
                f"{path}, depth {whole_text(depth)}, n_rs_seq {whole_text(found['n_rs_seq'])}"
            )
        elif path or not drafted:
            lines.append("no rollback")
        else:
            lines.append(f"rollback path not observed, depth {whole_text(depth)}")
        if drafted:
            lines.append(
                f"{drafted} drafted, {whole_text(found['num_accepted_draft_tokens'])} accepted"
            )
        return "\n".join(lines)

    def _seq_at(self, x: float, _y: float) -> int | None:
        if not self._seq_ids:
            return None
        axis = self.plot.run_axis
        round_ = axis.round_at(x)
        width = max(axis.start(round_ + 1) - axis.start(round_), 1e-9)
        across = (x - axis.centre(round_)) / width / _BAR_WIDTH + 0.5
        lane = int(across * len(self._seq_ids))
        return self._seq_ids[min(max(lane, 0), len(self._seq_ids) - 1)]

    def _first_seq(self) -> int | None:
        return self._seq_ids[0] if self._seq_ids else None

    def _summary(self) -> str:
        counts = {group: n for group, n in self._counts.items() if n or group != "untold"}
        if "untold" in counts:
            counts["path not observed"] = counts.pop("untold")
        facts = {"rounds": self.plot.n_rounds, "deepest rollback": self._deepest, **counts}
        return ", ".join(f"{name}: {value}" for name, value in facts.items())
