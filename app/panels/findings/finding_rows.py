"""The findings of a run or of the lanes of a comparison, as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PySide6.QtCore import QModelIndex, QObject, Qt

from app.looks.theme import Theme, icon
from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.message_text import in_window
from engine.analysis.findings.check import recorded, with_consequences
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

SEVERITIES = ("error", "warning", "info")
_COLUMNS = (
    TableColumn("severity", "severity", "error, warning or info", True),
    TableColumn("rule", "rule", "Rule that found it", True),
    TableColumn("round", "round", "Round it was found in; empty: the whole run"),
    TableColumn("seq", "seq", "Sequence; empty: all of them"),
    TableColumn("lane", "lane", "Lane of the comparison", True),
    TableColumn("message", "message", "What was found", True),
    TableColumn("evidence", "evidence", "The figures that show it", True),
    TableColumn("suggestion", "suggestion", "What to do about it", True),
)
_LONG = ("lane", "message", "evidence", "suggestion")
"""What may be cut in the table, and is whole in a tooltip."""


@dataclass(frozen=True, slots=True)
class ListedFinding:
    """One row of the findings table. round, seq: None for a finding about the whole run. cause: the
    rule of the first cause that it follows from, empty for such a cause."""

    run: RunRef
    round: int | None
    seq: int | None
    rule: str
    severity: str
    message: str
    evidence: str
    suggestion: str
    lane: str
    cause: str = ""


class FindingTable(ColumnTable):
    """Findings in the order of their recording."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
        self.findings: list[ListedFinding] = []
        self._runs: tuple[RunRef, ...] = ()
        self._n_read = 0
        self.retheme(theme)

    def show_runs(self, runs: tuple[RunRef, ...]) -> bool:
        """Show the findings of these runs of one trace; whether they are not those on show."""
        if runs == self._runs:
            return False
        self.beginResetModel()
        self._runs, self._n_read = runs, 0
        self.findings = []
        self.endResetModel()
        self.grow()
        return True

    def grow(self) -> bool:
        """Add the findings recorded since the last call; whether there were any."""
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
            new = _with_causes(self._runs[0].store, new)
            self.beginInsertRows(
                QModelIndex(), len(self.findings), len(self.findings) + len(new) - 1
            )
            self.findings += new
            self.endInsertRows()
        return bool(new)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._icons = {name: icon(name, theme, f"status.{name}") for name in SEVERITIES}
        self.layoutChanged.emit()

    def n_rows(self) -> int:
        return len(self.findings)

    def cell(self, row: int, name: str, role: int) -> Any:
        finding = self.findings[row]
        value = getattr(finding, name)
        if name == "rule" and finding.cause:
            if role == Qt.ItemDataRole.ToolTipRole:
                return f"Follows from {finding.cause}"
            value = f"↳ {value}"
        if role == Qt.ItemDataRole.DisplayRole:
            return "" if value is None else str(value)
        if role == Qt.ItemDataRole.ToolTipRole:
            return str(value) if name in _LONG else None
        if role == Qt.ItemDataRole.DecorationRole and name == "severity":
            return self._icons.get(finding.severity)
        return None

    def _finding(self, row: int) -> ListedFinding:
        store = self._runs[0].store
        found = store.findings.row(row)
        run = RunRef(store, found["run_id"])
        return ListedFinding(
            run,
            found["round"],
            found["seq_id"],
            found["rule"],
            found["severity"],
            found["message"],
            found["evidence"],
            in_window(found.get("suggestion", "")),
            run.facts.lane or "",
        )


def _with_causes(store: TraceStore, findings: list[ListedFinding]) -> list[ListedFinding]:
    """The same, each with the first cause that it follows from among all that are recorded."""
    cause_of = {
        (one.run_id, one.round, one.seq_id, one.rule): cause.rule
        for cause, following in with_consequences(recorded(store))
        for one in following
    }
    return [
        replace(one, cause=cause_of.get((one.run.run_id, one.round, one.seq, one.rule), ""))
        for one in findings
    ]
