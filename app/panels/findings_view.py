"""The Findings panel: what the rules found in a run or in the lanes of a comparison."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from PySide6.QtCore import QEvent, QItemSelectionModel, QModelIndex, QObject, Qt, Signal
from PySide6.QtWidgets import QStackedWidget

from app.looks import Theme, icon
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_rows import Position
from app.trace_models.shown_text import in_window
from app.widgets.build import split, words
from app.widgets.empty_state import EmptyState
from app.widgets.plain_table import ColumnTable, TableColumn, plain_table
from engine.analysis.findings.check import recorded, with_consequences
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_EMPTY, _NOTHING, _TABLE = range(3)
_IN_DETAIL = ("evidence", "suggestion")
"""Columns that only the text below the table has room for."""
_LEAST_MESSAGE = 36
_LEAST_LANE = 14
"""Characters; a narrow table shrinks the lane column for the message, then scrolls."""
_FITTED_ROWS = 200


class FindingsView(QStackedWidget):
    """A table above the full text of the chosen finding; choosing jumps to its round."""

    position_selected = Signal(object)  # Position
    run_selected = Signal(object)  # RunRef
    count_changed = Signal(int)

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._has_run = False
        self._lane_width = 0
        """Width of the longest lane name."""
        self.model = FindingTable(theme)
        self.table = plain_table(self.model, "Findings")
        self.table.selectionModel().selectionChanged.connect(self._on_selected)
        self._set_up_headers()
        side = Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft
        self.detail = words(selectable=True, accessibleName="The chosen finding", alignment=side)
        self.detail.setContentsMargins(8, 4, 8, 4)
        both = split(self.table, self.detail, down=True, sizes=())
        both.setStretchFactor(0, 1)
        self.addWidget(
            EmptyState(
                "No run yet",
                "Known failures are named here. Press Run (F5) or Compare.",
                waits_for_run=True,
            )
        )
        self.addWidget(EmptyState("No findings", "No rule found anything in the shown run."))
        self.addWidget(both)
        self.setFocusProxy(self.table)
        self.setAccessibleName("Findings")

    def show_run(self, run: RunRef | None) -> None:
        self._has_run = run is not None
        runs = () if run is None else lanes_of(run) or (run,)
        if self.model.show_runs(runs):
            self.detail.clear()
        self.table.setColumnHidden(self.model.column_of("lane"), len(runs) < 2)
        self._show_page()
        self._fit_columns()

    def refresh(self) -> None:
        if self.model.grow():
            self._show_page()
            self._fit_columns()

    def set_cursor(self, position: Position | None) -> None:
        """Mark the first finding of the round that all views share."""
        row = next(
            (
                i
                for i, one in enumerate(self.model.rows)
                if position is not None
                and (one["run"], one["round"], one["seq"])
                == (position.run, position.round, position.seq_id)
            ),
            None,
        )
        chosen = self.table.currentIndex()
        if row is not None and chosen.isValid():
            one, other = self.model.rows[row], self.model.rows[chosen.row()]
            if all(one[name] == other[name] for name in ("run", "round")):
                return  # several findings in one round: keep the chosen one
        blocked = self.table.selectionModel().blockSignals(True)
        index = QModelIndex() if row is None else self.model.index(row, 0)
        flags = QItemSelectionModel.SelectionFlag
        self.table.selectionModel().setCurrentIndex(index, flags.ClearAndSelect | flags.Rows)
        self.table.selectionModel().blockSignals(blocked)
        self.table.viewport().update()
        self._show_detail(index)

    def open_first(self, rules: Collection[str], *, keep_place: bool) -> str:
        """Choose the first finding of one of these rules, else the first of all, and go to its
        place unless keep_place; returns its message, empty without any."""
        found = self.model.rows
        at = next((i for i, one in enumerate(found) if one["rule"] in rules), 0)
        if not found:
            return ""
        blocked = self.table.selectionModel().blockSignals(keep_place)
        self.table.selectRow(at)
        self.table.selectionModel().blockSignals(blocked)
        self.table.viewport().update()
        self._show_detail(self.model.index(at, 0))
        return str(found[at]["message"])

    def _show_page(self) -> None:
        n = len(self.model.rows)
        if not self.table.currentIndex().isValid():
            self._show_detail(QModelIndex())
        nothing = _NOTHING if self._has_run else _EMPTY
        self.setCurrentIndex(_TABLE if n else nothing)
        self.count_changed.emit(n)

    def _on_selected(self) -> None:
        rows = self.table.selectionModel().selectedRows()
        if not rows:
            return
        index = rows[0]
        self._show_detail(index)
        finding = self.model.rows[index.row()]
        if finding["round"] is None:
            self.run_selected.emit(finding["run"])
        else:
            position = Position(finding["run"], finding["seq"] or 0, finding["round"], None)
            self.position_selected.emit(position)

    def _show_detail(self, index: QModelIndex) -> None:
        """Show the chosen finding in full, or the first one if none is chosen."""
        row = index.row() if index.isValid() else 0
        if row >= len(self.model.rows):
            self.detail.clear()
            return
        finding = self.model.rows[row]
        follows = f"follows from {finding['cause']}" if finding["cause"] else ""
        head = " · ".join(filter(None, (finding["rule"], finding["lane"], follows)))
        texts = (finding[name] for name in ("message", "evidence", "suggestion"))
        self.detail.setText("\n".join(filter(None, (head, *texts))))

    def _set_up_headers(self) -> None:
        for name in _IN_DETAIL:
            self.table.setColumnHidden(self.model.column_of(name), True)
        self.table.horizontalHeader().setResizeContentsPrecision(_FITTED_ROWS)
        self.table.viewport().installEventFilter(self)

    def _fit_columns(self) -> None:
        """Fit columns to their contents; the message gets the rest."""
        for column in range(self.model.column_of("message")):
            if not self.table.isColumnHidden(column):
                self.table.resizeColumnToContents(column)
        self._lane_width = self.table.columnWidth(self.model.column_of("lane"))
        self._share_out()

    def _share_out(self) -> None:
        """Distribute the width without measuring cells again: that is slow, and a resize does not
        change them."""
        table, character = self.table, self.fontMetrics().averageCharWidth()
        lane, message = self.model.column_of("lane"), self.model.column_of("message")
        if not table.isColumnHidden(lane):
            table.setColumnWidth(lane, self._lane_width)
        room = table.viewport().width() - table.horizontalHeader().sectionPosition(message)
        missing = _LEAST_MESSAGE * character - room
        if missing > 0 and not table.isColumnHidden(lane):
            taken = min(missing, max(0, table.columnWidth(lane) - _LEAST_LANE * character))
            table.setColumnWidth(lane, table.columnWidth(lane) - taken)
            room += taken
        table.setColumnWidth(message, max(room, _LEAST_MESSAGE * character))

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and watched is self.table.viewport():
            self._share_out()
        return super().eventFilter(watched, event)


SEVERITIES = ("error", "warning", "info")
_COLUMNS = (
    TableColumn("severity", "severity", "error, warning or info", True),
    TableColumn("rule", "rule", "Rule that reported it", True),
    TableColumn("round", "round", "Round it was found in; empty: the whole run"),
    TableColumn("seq", "seq", "Sequence; empty: all of them"),
    TableColumn("lane", "lane", "Lane of the comparison", True),
    TableColumn("message", "message", "Description", True),
    TableColumn("evidence", "evidence", "Evidence", True),
    TableColumn("suggestion", "suggestion", "What to do about it", True),
)
_LONG = ("lane", "message", "evidence", "suggestion")
"""May be elided in the table; the tooltip is complete."""


class FindingTable(ColumnTable):
    """Findings in recorded order.

    rows: the trace's row of each, round and seq None for one about the whole run; plus its run,
    lane, and cause: the rule of the first cause that it follows from, empty for such a cause
    itself.
    """

    columns = _COLUMNS

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self._runs: tuple[RunRef, ...] = ()
        self._n_read = 0
        self._theme = theme
        theme.apply(self._recolour)

    def show_runs(self, runs: tuple[RunRef, ...]) -> bool:
        """Show the findings of these runs of one trace; returns whether they have changed."""
        if runs == self._runs:
            return False
        self._runs, self._n_read = runs, 0
        self.show_rows([])
        self.grow()
        return True

    def grow(self) -> bool:
        """Add the findings recorded since the last call; returns whether there were any."""
        if not self._runs:
            return False
        table = self._runs[0].store.findings
        start, stop = self._n_read, len(table)
        if start == stop:
            return False
        self._n_read = stop
        mine = np.isin(table.column("run_id", start, stop), [run.run_id for run in self._runs])
        new = [self._finding(start + int(row)) for row in np.flatnonzero(mine)]
        if new:
            _add_causes(self._runs[0].store, new)
            self.beginInsertRows(QModelIndex(), len(self.rows), len(self.rows) + len(new) - 1)
            self.rows += new
            self.endInsertRows()
        return bool(new)

    def _recolour(self) -> None:
        self._icons = {name: icon(name, self._theme, f"status.{name}") for name in SEVERITIES}
        self.layoutChanged.emit()

    def cell(self, row: int, name: str, role: int) -> Any:
        finding = self.rows[row]
        value = finding[name]
        if name == "rule" and finding["cause"]:
            if role == Qt.ItemDataRole.ToolTipRole:
                return f"Follows from {finding['cause']}"
            value = f"↳ {value}"
        if role == Qt.ItemDataRole.DisplayRole:
            return "" if value is None else str(value)
        if role == Qt.ItemDataRole.ToolTipRole:
            return str(value) if name in _LONG else None
        if role == Qt.ItemDataRole.DecorationRole and name == "severity":
            return self._icons.get(finding["severity"])
        return None

    def _finding(self, row: int) -> dict[str, Any]:
        store = self._runs[0].store
        found = store.findings.row(row)
        run = RunRef(store, found["run_id"])
        more = {"seq": found["seq_id"], "suggestion": in_window(found.get("suggestion", ""))}
        return {**found, **more, "run": run, "lane": run.facts.lane or ""}


def _add_causes(store: TraceStore, findings: list[dict[str, Any]]) -> None:
    """Set each finding's first cause among all recorded ones."""
    cause_of = {
        (one.run_id, one.round, one.seq_id, one.rule): cause.rule
        for cause, following in with_consequences(recorded(store))
        for one in following
    }
    for one in findings:
        key = one["run_id"], one["round"], one["seq"], one["rule"]
        one["cause"] = cause_of.get(key, "")
