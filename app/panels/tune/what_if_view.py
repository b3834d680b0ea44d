"""The What-if view: estimated speed of the run with a smaller n_max: a table, a small plot, the
best one marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHeaderView

from app.looks import Theme
from app.trace_models.run_rows import RunRows
from app.trace_models.shown_text import plain_tip, significant
from app.widgets.build import UNLIMITED, hbox, made, turn, vbox
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.plain_table import ColumnTable, TableColumn, plain_table
from app.widgets.plot_surface import PlotSurface
from app.widgets.whole_run_view import WholeRunView
from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.surface import ASSUMPTIONS, DraftLengthEstimate, WhatIf, what_if
from engine.plain_text import counted
from engine.trace.records import MISSING
from engine.trace.run_ref import RunRef

_HEADS = {
    "n_max": ("n_max", "Longest draft, tokens; 0 means no drafting"),
    "expected_length": ("tok/round", "Expected tokens per round"),
    "draft_ms": ("draft ms", "Drafting, milliseconds per round"),
    "verify_ms": ("verify ms", "Forward pass of the target, milliseconds per round"),
    "rest_ms": ("rest ms", "Sampling, checkpoint, rollback and replay, milliseconds per round"),
    "step_ms": ("round ms", "Whole round, milliseconds"),
    "tokens_per_second": ("tok/s", "For the whole run, including rounds without a draft"),
}
_PARTS = ("draft_ms", "verify_ms", "rest_ms")
"""Parts of a round's time: left out if there is no room for all columns."""
_TABLE_SHARE, _PLOT_SHARE = 5, 2
"""Shares of the width if all columns are next to the plot; in less, some are left out and the plot
is below."""
_NOTE_FROM, _PLOT_FROM, _WRAPPED_FROM = 9, 16, 26
"""Heights in lines from which there is room for the note, for the plot below the table, and for the
whole note."""
_SPACING, _MARGIN = 3, 8
_LEAST_ROWS = 2
"""Least rows including the header; the others scroll."""
_MOST_ROUNDS = 10_000
"""Most rounds that estimates use, the newest ones: enough for three digits, and quick."""


class WhatIfView(WholeRunView):
    """Estimates for every n_max up to the longest draft of the run on show."""

    name = "What if n_max were smaller"
    empty_title = "No draft yet"
    about = (
        "Estimates which n_max would have been fastest, from a run with drafts. Press Run (F5) "
        "with a drafter."
    )
    untold = "the drafts of its rounds"
    period_ms = 250

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._rows: RunRows | None = None
        self._has_drafts = False
        self.headline = made(ElidedLabel, wordWrap=True)
        self.note = made(ElidedLabel, muted=True)
        self._estimates = EstimateTable()
        self.table_widget = table = plain_table(self._estimates, "Estimates by n_max")
        table.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        table.setMinimumHeight(_LEAST_ROWS * table.verticalHeader().defaultSectionSize())
        head = table.horizontalHeader()
        head.setMinimumSectionSize(table.fontMetrics().horizontalAdvance("00"))
        self._widest_head = max(head.sectionSizeHint(at) for at in range(head.count()))
        self.plot = SpeedPlot(theme)
        shares = (self.table_widget, _TABLE_SHARE), (self.plot, _PLOT_SHARE)
        self._parts = hbox(*shares, spacing=8)
        parts = self.headline, (self._parts, 1), self.note
        vbox(*parts, of=self.page, margins=(_MARGIN, 4, _MARGIN, 4), spacing=_SPACING)

    def table(self) -> tuple[list[str], list[list[object]]]:
        """The estimates as numbers; None: not observed."""
        self._read()
        result = self._estimate()
        estimates = () if result is None else result.estimates
        return list(_HEADS), [[getattr(e, name) for name in _HEADS] for e in estimates]

    def _begin(self, run: RunRef | None) -> None:
        self._rows, self._has_drafts = None if run is None else RunRows(run, "rounds"), False

    def _read(self) -> bool:
        if self._rows is not None:
            start, stop = self._rows.read()
            if start < stop and not self._has_drafts:
                drafted = self._rows.column("num_draft_tokens", start, stop) > 0
                single = self._rows.column("n_merged", start, stop) == MISSING
                self._has_drafts = bool((drafted & single).any())
        return self._has_drafts

    def _estimate(self) -> WhatIf | None:
        if self.run is None or not self._has_drafts:
            return None
        rounds = RecordedRounds.of(self.run, newest=_MOST_ROUNDS)
        return what_if(rounds, is_whole=self.run.ended)

    def _show(self) -> None:
        result = self._estimate()
        if result is None:
            return
        self.headline.setText(_headline(result))
        self.note.setText(_note(result))
        self.headline.setToolTip(plain_tip(f"{self.headline.text()}. {self.note.text()}"))
        self.plot.set_estimates(result)
        self._estimates.show_estimates(result)
        self._fit_plot()

    def minimumSizeHint(self) -> QSize:
        """Without the note and the plot below the table, which are hidden in a low view."""
        least = super().minimumSizeHint()
        if not self.note.isHidden():
            least -= QSize(0, self.note.minimumSizeHint().height() + _SPACING)
        below = self._parts.direction() is QBoxLayout.Direction.TopToBottom
        if below and not self.plot.isHidden():
            least -= QSize(0, self.plot.minimumHeight() + self._parts.spacing())
        return least

    def _fit_plot(self) -> None:
        """Show the plot if there is room for it and something to show."""
        lines = self.height() / self.fontMetrics().height()
        is_beside = self._parts.direction() is QBoxLayout.Direction.LeftToRight
        self.plot.setVisible(self.plot.has_speeds and (is_beside or lines >= _PLOT_FROM))
        table = self.table_widget
        row = table.verticalHeader().defaultSectionSize()
        high = table.horizontalHeader().sizeHint().height() + self._estimates.n_rows() * row
        limited = self.plot.isVisibleTo(self) and not is_beside
        table.setMaximumHeight(high + 2 * table.frameWidth() if limited else UNLIMITED)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        metrics = self.fontMetrics()
        lines = event.size().height() / metrics.height()
        head, table = self.table_widget.horizontalHeader(), self.table_widget
        widest = self._widest_head
        across = event.size().width() - 2 * _MARGIN - self._parts.spacing()
        bar = table.verticalScrollBar().sizeHint().width() + 2 * table.frameWidth()
        beside = across * _TABLE_SHARE // (_TABLE_SHARE + _PLOT_SHARE) - bar
        wide = beside >= len(_HEADS) * widest
        turn(self._parts, down=not wide)
        self._fit_plot()
        self.note.setVisible(lines >= _NOTE_FROM)
        self.note.setWordWrap(lines >= _WRAPPED_FROM)
        for name in _PARTS:
            table.setColumnHidden(list(_HEADS).index(name), not wide)
        n_shown = len(_HEADS) - (0 if wide else len(_PARTS))
        modes = QHeaderView.ResizeMode
        same = wide or across - bar >= n_shown * widest
        head.setSectionResizeMode(modes.Stretch if same else modes.ResizeToContents)


class EstimateTable(ColumnTable):
    """Rows are values of n_max, the best one with a star."""

    columns = tuple(TableColumn(name, *head) for name, head in _HEADS.items())
    _result: WhatIf | None = None

    def show_estimates(self, result: WhatIf) -> None:
        """Show other estimates."""
        same = len(result.estimates) == self.n_rows()
        if not same:
            self.beginResetModel()
        self._result = result
        if not same:
            self.endResetModel()
        self.dataChanged.emit(self.index(0, 0), self.index(self.n_rows() - 1, len(_HEADS) - 1))

    def n_rows(self) -> int:
        return 0 if self._result is None else len(self._result.estimates)

    def cell(self, row: int, name: str, role: int) -> Any:
        if self._result is None or role != Qt.ItemDataRole.DisplayRole:
            return None
        best, value = self._result.best, getattr(self._result.estimates[row], name)
        if name != "n_max":
            return significant(value)
        is_best = self._result.is_shown and best is not None and best.n_max == value
        return f"★ {value}" if is_best else str(value)


def _headline(result: WhatIf) -> str:
    best, recorded, steps = result.best, result.recorded, counted(result.n_steps, "step")
    if best is None:
        return f"Lengths only, times were not measured · estimate from {steps}"
    words = f"n_max {best.n_max}: {_speed(best)}"
    if best.n_max == recorded.n_max:
        words = f"None estimated faster than the recorded {words} in usual rounds"
    elif result.gain is None:
        words = f"Highest estimate, no verdict: {words}"
    else:
        low, high = (f"{100 * (one - 1):+.0f}" for one in result.gain)
        verdict = "Best" if result.is_shown else "No difference shown:"
        words = f"{verdict} {words}, {low} to {high} % against n_max {recorded.n_max} as recorded"
    if best.n_max + 1 in result.unmeasured_widths:
        words += f", too few passes of {best.n_max + 1} tokens were timed"
    return f"{words} · estimate from {steps}"


def _note(result: WhatIf) -> str:
    words = "Assumed: " + "; ".join(ASSUMPTIONS)
    if result.unmeasured_widths:
        widths = ", ".join(map(str, result.unmeasured_widths))
        words += (
            f"; few rounds verified {widths} tokens, so the costs of the nearest widths are used"
        )
    return f"{words}."


def _speed(estimate: DraftLengthEstimate) -> str:
    return f"{significant(estimate.tokens_per_second)} tok/s"


class SpeedPlot(PlotSurface):
    """A line of tokens per second; a star is the best n_max, a ring the one that was recorded."""

    def __init__(self, theme: Theme) -> None:
        super().__init__(theme, "0000 ")
        self.setAccessibleName("Estimated speed by n_max")
        self.setMinimumHeight(2 * self.fontMetrics().height())
        self.has_speeds = False
        self.name_axes("tok/s", "n_max")
        line = pg.PlotDataItem(symbol="o", symbolSize=4, connect="finite")
        self._line = self.put(line, "ui.accent", "ui.accent")
        recorded = pg.ScatterPlotItem(symbol="o", size=12)
        self._recorded = self.put(recorded, "plot.text", width=1.5)
        self._best = self.put(pg.ScatterPlotItem(symbol="star", size=14), "", "plot.limit")

    def set_estimates(self, result: WhatIf | None) -> None:
        """Show the estimates; nothing if the run was not timed."""
        best = None if result is None else result.best
        self.has_speeds = best is not None
        if result is None or best is None:
            for item in (self._line, self._recorded, self._best):
                item.setData([], [])
            return
        speeds = np.array([e.tokens_per_second or np.nan for e in result.estimates])
        n_max = np.arange(len(speeds))
        self._line.setData(n_max, speeds)
        self._recorded.setData([n_max[-1]], [speeds[-1]])
        at = [best.n_max] if result.is_shown else []
        self._best.setData(at, speeds[at])
        step = max(1, -(-len(speeds) // 8))
        ticks = [(int(k), str(k)) for k in n_max[::step]]
        self.getPlotItem().getAxis("bottom").setTicks([ticks])
        self.box.setRange(
            xRange=(-0.4, n_max[-1] + 0.4), yRange=(0, np.nanmax(speeds) * 1.2), padding=0
        )
        self.setAccessibleDescription(
            ", ".join(
                f"n_max {k}: {significant(speed)} tokens/s"
                for k, speed in enumerate(speeds)
                if speed > 0
            )
        )
