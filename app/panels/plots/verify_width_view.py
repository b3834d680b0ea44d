"""How many tokens the target decoded at once, and in which ubatches."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt

from app.looks import Theme
from app.panels.plots.bar_view import BarView, PixelColumns, StackedBars, sample
from app.trace_models.run_facts import is_ours
from app.trace_models.run_rows import RunOverlay, RunRows
from app.trace_models.shown_text import whole_text
from app.widgets.legend import Swatch
from app.widgets.line_styles import draw_dashes
from app.widgets.plot_surface import draw_nothing
from engine.plain_text import counted
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

_PURPOSES = ("prompt", "verify", "replay")
_PARTS = (*_PURPOSES, "padding")
_ROLES = ("plot.axis", "phase.verify", "phase.replay", "status.warning")
_PATTERNS = (
    Qt.BrushStyle.Dense5Pattern,
    Qt.BrushStyle.SolidPattern,
    Qt.BrushStyle.BDiagPattern,
    Qt.BrushStyle.DiagCrossPattern,
)
_TIPS = (
    "Prompt tokens; cut off at the top if the prompt is long",
    "Drafts and the token before them",
    "Accepted tokens decoded again after a restore",
    "Padding tokens that make drafts equally long",
)
_LONGEST = "n_max + 1"
_LONGEST_AT = len(_PARTS) + 1
_BORDERS_FROM_PIXELS = 5.0


class VerifyWidthView(BarView):
    """Bars of tokens per round, including padding, divided by ubatch; a line at the widest
    verification that adaptive depth allowed."""

    name, y_label = "Verify width", "tokens"
    about = "Shows the tokens of every forward pass and how they were split. Press Run (F5)."
    widest_label = "n_max + 1: 16"
    overlay_tip = "Tokens that the target decoded in each round"

    def __init__(self, theme: Theme) -> None:
        swatches = [
            Swatch(part, role, tip, sample(pattern))
            for part, role, tip, pattern in zip(_PARTS, _ROLES, _TIPS, _PATTERNS, strict=True)
        ]
        border = Swatch(
            "ubatch border",
            "plot.limit",
            "Boundary of two ubatches; hover for the reason",
            draw_dashes,
        )
        longest = Swatch(
            _LONGEST,
            "plot.text",
            "Limit of adaptive draft length, if it is in use, plus the token before the draft",
            draw_dashes,
        )
        super().__init__(theme, [border, *reversed(swatches), longest])
        self._rows_over: dict[RunRef, RunRows] = {}
        self._bars = StackedBars(self.plot, _ROLES, _PATTERNS)
        put, pairs = self.plot.put, pg.PlotCurveItem
        self._borders = put(pairs(connect="pairs"), "plot.limit", width=1.5)
        self._longest = put(pairs(connect="pairs"), "plot.text", width=2.0)
        self._reset()

    def _reset(self) -> None:
        self._passes: RunRows | None = None
        self._n_padding = 0
        self._widest = 0
        self._bars.clear()
        draw_nothing(self._borders, self._longest)

    def _read(self, run: RunRef) -> int | None:
        self._rows.read()
        self._passes, start, stop = _read_rows(self._passes, run)
        if start == stop:
            return None
        self._n_padding += int(_padding(self._passes, start, stop).sum())
        width = self._heights(self._passes, start, stop)
        verify = self._purpose(self._passes, start, stop) == _PURPOSES.index("verify")
        self._widest = max(self._widest, int(width[verify].max(initial=0)))
        return int(self._passes.rounds.values[-1]) + 1

    def _purpose(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        """Index into _PURPOSES of rows start..stop, -1 for any other, int64 [n]."""
        if not _are_ubatches(rows):
            prompt = rows.column("num_draft_tokens", start, stop) == MISSING
            return np.where(prompt, _PURPOSES.index("prompt"), _PURPOSES.index("verify"))
        codes = rows.column("purpose", start, stop)
        found = np.full(len(codes), -1)
        for number, purpose in enumerate(_PURPOSES):
            found[codes == rows.run.store.text_pool.find(purpose)] = number
        return found

    def _heights(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        if not _are_ubatches(rows):
            widths: np.ndarray = np.maximum(rows.column("verify_width", start, stop), 0)
            return widths
        n_seqs, n_tokens = (
            np.maximum(rows.column(name, start, stop), 0) for name in ("n_seqs", "n_seq_tokens")
        )
        tokens: np.ndarray = n_seqs * n_tokens
        return tokens

    def _height_words(self, height: float) -> str:
        return f"{height:.0f} tokens in total"

    def _decodes_prompt(self, rows: RunRows, start: int, stop: int) -> np.ndarray:
        decodes: np.ndarray = self._purpose(rows, start, stop) == _PURPOSES.index("prompt")
        return decodes

    def _rows_of(self, overlay: RunOverlay) -> RunRows:
        rows, _, _ = _read_rows(self._rows_over.get(overlay.run), overlay.run)
        self._rows_over[overlay.run] = rows
        return rows

    def _clear_overlay(self) -> None:
        super()._clear_overlay()
        self._rows_over = {}

    def _draw(self) -> None:
        if self._passes is None or self.run is None:
            return
        start, stop = self._passes.between(*self.plot.rounds_in_sight)
        of_row = self._passes.rounds.values[start:stop]
        rounds, firsts, lane = np.unique(of_row, return_index=True, return_inverse=True)
        parts = np.zeros((len(_PARTS), len(rounds)))
        if len(rounds):
            purposes = self._purpose(self._passes, start, stop)
            padding = _padding(self._passes, start, stop)
            real = self._heights(self._passes, start, stop) - padding
            for part in range(len(_PURPOSES)):
                mine = purposes == part
                np.add.at(parts[part], lane[mine], real[mine])
            np.add.at(parts[-1], lane, padding)
        axis, pixel = self.plot.run_axis, self.plot.pixel
        columns, x0, x1 = self._columns(axis, rounds)
        parts = columns.most(parts)
        self._bars.set(x0, x1, parts, pixel)
        roomy = len(rounds) and _BORDERS_FROM_PIXELS * pixel <= axis.round_width
        if roomy and _are_ubatches(self._passes):
            self._draw_borders(start, stop, firsts, rounds, lane)
        else:
            self._borders.setData([], [])
        highest = self._draw_longest(columns, rounds, x0, x1)
        later = parts[1:].sum(axis=0)
        top = float(later.max(initial=0.0)) or float(parts.sum(axis=0).max(initial=1.0))
        top = max(top, highest, self._draw_overlay())
        self.plot.set_y_range(0, top * 1.15)

    def _draw_longest(
        self, columns: PixelColumns, rounds: np.ndarray, x0: np.ndarray, x1: np.ndarray
    ) -> float:
        """The longest draft of each round, the maximum over sequences; returns its height, 0
        without adaptive depth. columns: of the rounds, from x0 to x1."""
        rows = self._rows
        if not len(rounds):
            return 0.0
        start, stop = rows.between(*self.plot.rounds_in_sight)
        n_max, of_row = rows.column("draft_n_max", start, stop), rows.rounds.values[start:stop]
        known = np.flatnonzero((n_max != MISSING) & np.isin(of_row, rounds))
        newest = f": {n_max[known[-1]] + 1}" if len(known) else ""
        self.legend.set_label(_LONGEST_AT, f"{_LONGEST}{newest}")
        widths = np.zeros(len(rounds))
        np.maximum.at(widths, np.searchsorted(rounds, of_row[known]), n_max[known] + 1.0)
        widths = columns.most(widths)
        drawn = widths > 0
        x = np.stack([x0[drawn], x1[drawn]], axis=1).ravel()
        self._longest.setData(x, np.repeat(widths[drawn], 2))
        return float(widths.max(initial=0.0))

    def _draw_borders(
        self, start: int, stop: int, firsts: np.ndarray, rounds: np.ndarray, lane: np.ndarray
    ) -> None:
        """A line across the bar between two ubatches. firsts: the first of rows start..stop in each
        of rounds, int64 [rounds]; lane: each row's index into rounds."""
        assert self._passes is not None
        axis = self.plot.run_axis
        tops = np.cumsum(self._heights(self._passes, start, stop))
        before = np.concatenate([[0], tops])[firsts]
        inner = np.append(lane[1:] == lane[:-1], False)
        at = rounds[lane[inner]]
        y = (tops - before[lane])[inner]
        x = np.stack([axis.starts(at), axis.ends(at)], axis=1).ravel()
        self._borders.setData(x, np.repeat(y, 2).astype(float))

    def _lines_of(self, round_: int) -> list[str]:
        lines = list[str]()
        assert self._passes is not None
        for row in self._passes.of_round(round_):
            if not _are_ubatches(self._passes):
                lines.append(f"sequence {row['seq_id']}: {whole_text(row['verify_width'])} tokens")
                continue
            words = f"{row['purpose']}: {row['n_seqs']} × {row['n_seq_tokens']} tokens"
            if row["n_padding"]:
                words += f", {row['n_padding']} padding"
            lines.append(words + (f" · {row['reason']}" if row["reason"] else ""))
        return lines + [
            f"sequence {row['seq_id']}: n_max {row['draft_n_max']} by adaptive depth"
            for row in (self._rows.of_round(round_) if lines else [])
            if row["draft_n_max"] is not None
        ]

    def table(self) -> tuple[list[str], list[list[object]]]:
        assert self._passes is not None
        if not _are_ubatches(self._passes):
            names = ["round", "seq_id", "verify_width", "num_draft_tokens"]
            return names, self._passes.listed(names, *self.plot.rounds_in_sight)
        names = [
            "round",
            "ubatch",
            "n_seqs",
            "n_seq_tokens",
            "seq_ids",
            "n_padding",
            "purpose",
            "reason",
            "ms",
        ]
        return names, self._passes.listed(names, *self.plot.rounds_in_sight)

    def _summary(self) -> str:
        counts = f"rounds: {self.plot.n_rounds}"
        widest = f"widest verify: {counted(self._widest, 'token')}"
        if self._passes is not None and not _are_ubatches(self._passes):
            return f"{counts}, ubatches not observed, {widest}"
        n = 0 if self._passes is None else len(self._passes)
        return f"{counts}, ubatches: {n}, {widest}, padding: {counted(self._n_padding, 'token')}"


def _read_rows(known: RunRows | None, run: RunRef) -> tuple[RunRows, int, int]:
    """Rows of ubatches, or of rounds if a server reports none; start and stop of the new ones."""
    rows = RunRows(run, "ubatches") if known is None else known
    start, stop = rows.read()
    if not len(rows) and not is_ours(run.facts):
        rows = RunRows(run, "rounds")
        start, stop = rows.read()
    return rows, start, stop


def _are_ubatches(rows: RunRows) -> bool:
    """Whether rows are those of `ubatches` or, if a source reports no more, of `rounds`."""
    return rows.table is rows.run.store.ubatches


def _padding(rows: RunRows, start: int, stop: int) -> np.ndarray:
    """Filler tokens of rows start..stop, int64 [n]."""
    if not _are_ubatches(rows):
        return np.zeros(stop - start, np.int64)
    return np.maximum(rows.column("n_padding", start, stop), 0)
