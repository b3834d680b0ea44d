"""Time of each round by phase, and the speed-up over plain decoding."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt

from app.looks import Theme
from app.panels.plots.bar_view import BarView, StackedBars, per_round, sample
from app.trace_models.run_facts import is_ours
from app.trace_models.run_rows import RunRows
from app.trace_models.shown_text import significant
from app.widgets.legend import Swatch
from app.widgets.line_styles import draw_dashes
from app.widgets.plot_surface import draw_nothing
from engine.analysis.run_cost import PlainRatio
from engine.trace.records import MISSING, PHASES
from engine.trace.run_ref import RunRef

_PATTERNS = {
    "draft": Qt.BrushStyle.FDiagPattern,
    "replay": Qt.BrushStyle.BDiagPattern,
    "restore": Qt.BrushStyle.DiagCrossPattern,
}
_TIPS = {
    "draft": "Drafting, and updating the drafter's memory",
    "verify": "Forward passes of the target",
    "sample": "Sampling and acceptance",
    "save": "Saving a checkpoint",
    "rollback": "Partial removal",
    "restore": "Restoring a checkpoint",
    "replay": "Decoding accepted tokens again",
}
_PARTS = (*PHASES, "total")
"""Phases, and rounds with only a total time."""
_ROLES = [*(f"phase.{phase}" for phase in PHASES), "phase.total"]
_PATTERN_OF = [
    *(_PATTERNS.get(phase, Qt.BrushStyle.SolidPattern) for phase in PHASES),
    Qt.BrushStyle.Dense4Pattern,
]
_TOTAL = Swatch(
    "whole round",
    "phase.total",
    "The engine does not report how the time was spent",
    sample(_PATTERN_OF[-1]),
)
_REFRESHES_PER_SPEED = 15
NO_BASELINE = "no baseline"
_BASELINE_TIP = (
    "Tokens per second relative to plain decoding, lowest and highest of several pairs of runs; "
    "the dashed line is plain decoding's time per token. To measure it, press Measure plain "
    "below the text of a finished run."
)


class TimingView(BarView):
    """Stacked bars of each round's phases, all sequences together, in milliseconds."""

    name, y_label = "Time per round", "ms"
    about = "Shows how the time of every round was spent. Press Run (F5)."
    widest_label = "0.00 to 0.00×"
    untold = "how long its rounds took"
    overlay_tip = "Time of each round, all phases together,"
    means = True

    def __init__(self, theme: Theme) -> None:
        swatches = [
            Swatch(phase, f"phase.{phase}", _TIPS[phase], sample(pattern))
            for phase, pattern in zip(PHASES, _PATTERN_OF, strict=False)
        ]
        baseline = Swatch(NO_BASELINE, "plot.limit", _BASELINE_TIP, draw_dashes)
        super().__init__(theme, [baseline, *reversed(swatches)])
        self._bars = StackedBars(self.plot, _ROLES, _PATTERN_OF)
        self._longest = self.plot.put(pg.PlotDataItem(connect="finite"), "plot.text")
        plain = pg.InfiniteLine(angle=0, movable=False)
        self._plain = self.plot.put(plain, "plot.limit", style=Qt.PenStyle.DashLine)
        self._reset()

    def _reset(self) -> None:
        self._n_refreshes = 0
        self._is_timed = False
        self._ratio: PlainRatio | None = None
        self._plain.hide()
        self._bars.clear()
        draw_nothing(self._longest)
        self._show_behind([])

    def plain_measured(self) -> None:
        if self.run is not None:
            self._find_speed(self.run)

    def _read(self, run: RunRef) -> int | None:
        start, stop = self._rows.read()
        parts = _part_ms(self._rows, start, stop)
        self._is_timed |= is_ours(run.facts) or bool(parts.any())
        if parts[-1].any():
            self._show_behind([_TOTAL])
        if self._n_refreshes % _REFRESHES_PER_SPEED == 0 or start == stop:
            self._find_speed(run)
        self._n_refreshes += 1
        if start == stop or not self._is_timed:
            return None
        return int(self._rows.rounds.values[-1]) + 1

    def _find_speed(self, run: RunRef) -> None:
        self._ratio = ratio = PlainRatio.of(run.facts)
        self.legend.set_label(0, NO_BASELINE if ratio is None else ratio.range_text)
        self._plain.setVisible(ratio is not None)
        if ratio is not None:
            self._plain.setValue(1e3 / ratio.plain_speed)

    def _matrix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rounds in sight [n], their time by part [parts, n], and which decode prompts [n]."""
        start, stop = self._rows.between(*self.plot.rounds_in_sight)
        of_row = self._rows.rounds.values[start:stop]
        rounds, ms = per_round(of_row, _part_ms(self._rows, start, stop), np.add)
        _, prompt = per_round(of_row, self._decodes_prompt(self._rows, start, stop), np.logical_or)
        return rounds, ms, prompt

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        total: np.ndarray = _part_ms(rows, start, stop).sum(axis=0)
        return total

    def _height_words(self, height: float) -> str:
        return f"{significant(height)} ms in total"

    def _decodes_prompt(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        undrafted: np.ndarray = rows.column("num_draft_tokens", start, stop) == MISSING
        return undrafted

    def _draw(self) -> None:
        rounds, ms, prompt = self._matrix()
        columns, x0, x1 = self._columns(self.plot.run_axis, rounds)
        self._bars.set(x0, x1, columns.mean(ms), self.plot.pixel)
        total = ms.sum(axis=0)
        if columns.is_exact:
            self._longest.setData([], [])
        else:  # bars are averages now
            self._longest.setData((x0 + x1) / 2, columns.most(total))
        shown = total[~prompt] if not prompt.all() else total
        top = max(float(shown.max(initial=0.0)), self._draw_overlay()) or 1.0
        self.plot.set_y_range(0, top * 1.1)

    def _lines_of(self, round_: int) -> list[str]:
        lines = list[str]()
        start, stop = self._rows.between(round_, round_ + 1)
        for part, ms in zip(_PARTS, _part_ms(self._rows, start, stop), strict=True):
            known = np.isfinite(self._rows.column(f"{part}_ms", start, stop)).any()
            if known and (part in PHASES or ms.any()):
                name = part if part in PHASES else "whole round"
                lines.append(f"{name} {significant(ms.sum())} ms")
        return lines or ["time not observed"] * (start < stop)

    def table(self) -> tuple[list[str], list[list[object]]]:
        names = ["round", "seq_id", "t_ms", *(f"{part}_ms" for part in _PARTS)]
        return names, self._rows.listed(names, *self.plot.rounds_in_sight)

    def _summary(self) -> str:
        all_ms = _part_ms(self._rows, 0, len(self._rows)).sum(axis=1)
        sums = dict(zip(_PARTS, all_ms.tolist(), strict=True))
        if not sums["total"]:
            del sums["total"]
        words = ", ".join(f"{part}: {significant(ms)} ms" for part, ms in sums.items())
        speed_up = NO_BASELINE if self._ratio is None else self._ratio.words
        return f"rounds: {self.plot.n_rounds}, {words}, {speed_up}"


def _part_ms(rows: RunRows, start: int, stop: int) -> np.ndarray:
    """Milliseconds by part, 0 if not observed, float64 [parts, n]; a round's total counts only if
    none of its phases is known."""
    ms = np.stack([rows.column(f"{part}_ms", start, stop) for part in _PARTS])
    ms[-1, np.isfinite(ms[:-1]).any(axis=0)] = 0.0
    return np.nan_to_num(ms)
