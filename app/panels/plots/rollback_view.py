"""Rollback depth of each round, with the path taken and the limit n_rs_seq; one strip per
sequence."""

from __future__ import annotations

import math

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt

from app.looks import Theme
from app.panels.plots.bar_view import BarView, PixelColumns
from app.trace_models.run_rows import GrowingArray, RunRows
from app.trace_models.shown_text import whole_text
from app.widgets.legend import Swatch
from app.widgets.line_styles import draw_bar, draw_cross, draw_dashes, draw_hatched, draw_hollow
from app.widgets.plot_surface import draw_nothing
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

_GROUPS = ("seq_rm", "restore", "refused", "untold")
_GROUP_OF_PATH = {"seq_rm": 0, "restore": 1, "restore_depth": 1, "refused": 2}
_UNTOLD = 3
"""A draft was judged, but the engine did not report the rollback."""
_NO_GROUP = -1
_BAR_WIDTH = 0.8
_STUB = 0.15
"""Bar height of a restore or refusal with depth 0, or an unreported one."""


_SWATCHES = (
    Swatch("n_rs_seq", "plot.limit", "Deepest rollback by snapshot planes", draw_dashes),
    Swatch("seq_rm", "path.seq_rm", "Tokens removed, a snapshot plane read instead", draw_bar),
    Swatch(
        "restore",
        "path.restore",
        "Checkpoint restored, the accepted tokens decoded again",
        draw_hatched,
    ),
    Swatch("refused", "path.refused", "The rollback was refused", draw_cross),
)
_UNTOLD_SWATCH = Swatch(
    "not observed",
    "path.untold",
    "The engine does not report whether or how it rolled back",
    draw_hollow,
)


class RollbackView(BarView):
    """Bars of rollback depth and the dashed n_rs_seq line; with several sequences each has a strip,
    the first one on top, and an overlaid run the strip below."""

    name, y_label = "Rollback depth", "depth"
    about = "Shows how deep each round rolled back and by which path. Press Run (F5)."
    overlay_tip = "Deepest rollback of each round, all sequences,"
    sequences = np.maximum

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, _SWATCHES)
        put, dotted, none = self.plot.put, Qt.PenStyle.DotLine, np.zeros(0)
        bars = {group: pg.BarGraphItem(x=none, height=none, width=1.0) for group in _GROUPS}
        self._bars = bars
        put(bars["seq_rm"], "", "path.seq_rm")
        put(bars["restore"], "", "path.restore", pattern=Qt.BrushStyle.BDiagPattern)
        put(bars["refused"], "path.refused")
        put(bars["untold"], "path.untold", style=dotted)
        crosses = pg.ScatterPlotItem(symbol="x", size=9)
        self._crosses = put(crosses, "path.refused", "path.refused", width=2.0)
        self._limits: list[pg.InfiniteLine] = []
        """One per strip."""
        self._reset()

    def _reset(self) -> None:
        self._groups = GrowingArray(np.int64)
        self._seq_ids: list[int] = []
        self._counts = dict.fromkeys(_GROUPS, 0)
        self._deepest = 0
        self._n_rs_seq: int | None = None
        none = np.zeros(0)
        for bars in self._bars.values():
            bars.setOpts(x=none, height=none, width=none, y0=none)
        draw_nothing(self._crosses)
        for line in self._limits:
            line.hide()
        self._show_behind([])

    def _read(self, run: RunRef) -> int | None:
        start, stop = self._rows.read()
        if start == stop:
            return None
        seq_ids, depths, limits, codes, drafted = (
            self._rows.column(name, start, stop)
            for name in (
                "seq_id",
                "rollback_depth",
                "n_rs_seq",
                "rollback_path",
                "num_draft_tokens",
            )
        )
        paths = zip(run.store.text_pool.decode(codes), drafted.tolist(), strict=True)
        groups = [
            _GROUP_OF_PATH.get(path, _NO_GROUP) if path or n <= 0 else _UNTOLD for path, n in paths
        ]
        self._groups.add(np.array(groups))
        self._seq_ids = sorted({*self._seq_ids, *np.unique(seq_ids).tolist()})
        self._deepest = max(self._deepest, int(depths.max()))
        for number, group in enumerate(_GROUPS):
            self._counts[group] += groups.count(number)
        if self._counts["untold"]:
            self._show_behind([_UNTOLD_SWATCH])
        limits = limits[limits != MISSING]
        if len(limits):
            self._n_rs_seq = int(limits[-1])
        return int(self._rows.rounds.values[-1]) + 1

    def _draw(self) -> None:
        first, stop = self._rows.between(*self.plot.rounds_in_sight)
        rounds, groups = (one.values[first:stop] for one in (self._rows.rounds, self._groups))
        seq_ids, depths = (
            self._rows.column(name, first, stop) for name in ("seq_id", "rollback_depth")
        )
        axis, n_pixels = self.plot.run_axis, self.plot.n_pixels
        starts, ends = axis.starts(rounds), axis.ends(rounds)
        width, x = np.maximum((ends - starts) * _BAR_WIDTH, self.plot.pixel), (starts + ends) / 2
        overlaid = round(self._draw_overlay())
        top = max(self._deepest, overlaid, self._n_rs_seq or 0, 1)
        strip = top * 1.25 + 0.35
        strips = self._n_strips - 1 - np.searchsorted(self._seq_ids, seq_ids)
        for number, (group, bars) in enumerate(self._bars.items()):
            at = np.flatnonzero(groups == number)
            if not len(at) and not len(bars.opts["x"]):
                continue  # pyqtgraph does work even for no bars
            at = at[np.argsort(strips[at], kind="stable")]
            columns = PixelColumns(x[at], *self.plot.x_range, n_pixels, strips[at])
            middle, wide, bottoms = (columns.first(one[at]) for one in (x, width, strip * strips))
            high = columns.most(np.maximum(depths[at], 0.0 if group == "seq_rm" else _STUB))
            bars.setOpts(x=middle, height=high, width=wide, y0=bottoms)
            if group == "refused":
                self._crosses.setData(middle, bottoms + high + 0.3)
        self._draw_limits(top, strip)

    @property
    def _n_strips(self) -> int:
        n = max(1, len(self._seq_ids))
        return n + 1 if n > 1 and self.overlay is not None else n

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        return np.maximum(rows.column("rollback_depth", start, stop), 0)

    def _height_words(self, height: float) -> str:
        return f"deepest rollback {height:.0f}"

    def table(self) -> tuple[list[str], list[list[object]]]:
        names = ["round", "seq_id", "rollback_depth", "rollback_path", "n_rs_seq"]
        return names, self._rows.listed(names, *self.plot.rounds_in_sight)

    def _draw_limits(self, top: int, strip: float) -> None:
        """The dashed lines, unless they would cover low strips, and a y-axis with room for the
        strips. top: the depth that a strip has room for."""
        limit, n = self._n_rs_seq, self._n_strips
        has_room = n == 1 or self.plot.box.height() >= n * self.plot.line_height
        while has_room and len(self._limits) < n:
            line = pg.InfiniteLine(angle=0, movable=False)
            self._limits.append(self.plot.put(line, "plot.limit", style=Qt.PenStyle.DashLine))
        n_seqs = max(1, len(self._seq_ids))
        for number, line in enumerate(self._limits):
            line.setVisible(limit is not None and has_room and number < n_seqs)
            if limit is not None:
                line.setValue(strip * (n - 1 - number) + limit)
        self.legend.set_label(0, "n_rs_seq" if limit is None else f"n_rs_seq = {limit}")
        self.plot.set_y_range(0, strip * n)
        if n > 1:
            names = [f"seq {seq_id}" for seq_id in self._seq_ids]
            if n > n_seqs:
                names.append("other" if self.overlay is None else self.overlay.name)
            middles = [strip * (n - 0.5 - at) for at in range(n)]
            ticks = list(zip(middles, names, strict=True))
            if self.plot.box.height() >= 2 * n * self.plot.line_height:  # a depth for each
                deep = top - strip / 2
                pairs = (
                    ((at + deep - strip / 2, name), (at + deep, str(top))) for at, name in ticks
                )
                ticks = [one for pair in pairs for one in pair]
            self.plot.set_rows(ticks)
        else:
            depths = range(0, top + 1, -(-top // 4))
            self.plot.set_rows([(value, str(value)) for value in depths])

    def _tip(self, x: float, y: float) -> str:
        round_ = self.plot.run_axis.round_at(x)
        seq_id, rows = self._seq_at(x, y), self._rows.of_round(round_)
        found = next((row for row in rows if row["seq_id"] == seq_id), None)
        if found is None:
            return ""
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

    def _seq_at(self, _x: float, y: float) -> int | None:
        if not self._seq_ids:
            return None
        strip = self.plot.box.viewRange()[1][1] / self._n_strips
        at = self._n_strips - 1 - math.floor(y / max(strip, 1e-9))
        return self._seq_ids[min(max(at, 0), len(self._seq_ids) - 1)]

    def _first_seq(self) -> int | None:
        return self._seq_ids[0] if self._seq_ids else None

    def _summary(self) -> str:
        counts = {group: n for group, n in self._counts.items() if n or group != "untold"}
        if "untold" in counts:
            counts["path not observed"] = counts.pop("untold")
        facts = {"rounds": self.plot.n_rounds, "deepest rollback": self._deepest, **counts}
        return ", ".join(f"{name}: {value}" for name, value in facts.items())
