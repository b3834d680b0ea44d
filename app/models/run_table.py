"""The runs of a session as a table."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QFont

from app.looks.theme import Theme, icon
from app.models.column_table import ColumnTable, TableColumn
from app.models.live_numbers import significant
from app.models.run_facts import RunRow, run_row
from engine.trace.store import TraceStore

_COLUMNS = (
    TableColumn("run", "run", "Number of the run, in the order of starting"),
    TableColumn("title", "lane or drafters", "Lane of a comparison, else what drafts", True),
    TableColumn("tokens", "tokens", "Tokens generated, all sequences"),
    TableColumn("acceptance", "acceptance", "Accepted / drafted"),
    TableColumn("speed", "tok/s", "Tokens generated a second, prompts left out"),
    TableColumn("stop", "stop", "Why the run ended", True),
    TableColumn("marks", "marks", "Why the output is not the model's own", True),
)


class RunTable(ColumnTable):
    """Runs in the order of starting; those that the user hid are left out."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
        self.rows: list[RunRow] = []
        self._store: TraceStore | None = None
        self._hidden: set[int] = set()
        self._shown: int | None = None
        self._overlaid: int | None = None
        self.retheme(theme)

    @property
    def n_hidden(self) -> int:
        return len(self._hidden)

    @property
    def shown(self) -> int | None:
        """The run that the other views show."""
        return self._shown

    @property
    def overlaid(self) -> int | None:
        """The run that lies over it."""
        return self._overlaid

    def set_overlaid(self, run_id: int | None) -> None:
        """Mark the run that lies over the one on show, and list it even if it was hidden."""
        self._overlaid = run_id
        self._hidden.discard(-1 if run_id is None else run_id)
        self.refresh()

    def other(self, chosen: int | None) -> int | None:
        """A run to lay over the one on show: the chosen one, else the newest other."""
        others = [row.run_id for row in self.rows if row.run_id != self._shown]
        return chosen if chosen in others else max(others, default=None)

    def set_store(self, store: TraceStore | None, shown: int | None) -> None:
        """List the runs of a trace and mark the one on show."""
        self._shown = shown
        if store is not self._store:
            self.beginResetModel()
            self._store, self._hidden, self.rows = store, set(), []
            self.endResetModel()
        self._hidden.discard(-1 if shown is None else shown)
        self.refresh()

    def refresh(self) -> None:
        """Take in new runs, and the figures of those that had not ended."""
        store = self._store
        if store is None:
            return
        known = {row.run_id: row for row in self.rows}
        wanted = [run_id for run_id in range(len(store.runs)) if run_id not in self._hidden]
        if wanted != list(known):
            self.beginResetModel()
            self.rows = [known.get(run_id) or run_row(store, run_id) for run_id in wanted]
            self.endResetModel()
        for i, row in enumerate(self.rows):
            if not row.ended:
                self.rows[i] = run_row(store, row.run_id)
        if self.rows:
            last = self.index(len(self.rows) - 1, len(_COLUMNS) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def hide_run(self, run_id: int) -> None:
        """Leave a run out of the list; it stays in the trace. Not the one on show."""
        if run_id != self._shown:
            self._hidden.add(run_id)
            self.refresh()

    def show_all(self) -> None:
        """List the hidden runs again."""
        self._hidden.clear()
        self.refresh()

    def row_of(self, run_id: int | None) -> int | None:
        """Where a run is in the list."""
        return next((i for i, row in enumerate(self.rows) if row.run_id == run_id), None)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self._shown_icon = icon("run", theme, "ui.accent")
        self._overlaid_icon = icon("overlay", theme, "plot.overlay")
        self.layoutChanged.emit()

    def n_rows(self) -> int:
        return len(self.rows)

    def cell(self, row: int, name: str, role: int) -> Any:
        run = self.rows[row]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return _text(run, name)
        if role == Qt.ItemDataRole.DecorationRole and name == "run":
            icons = {self._overlaid: self._overlaid_icon, self._shown: self._shown_icon}
            return icons.get(run.run_id)
        if role == Qt.ItemDataRole.FontRole and run.run_id == self._shown:
            font = QFont()
            font.setBold(True)
            return font
        if role == Qt.ItemDataRole.ForegroundRole and run.marks:
            return self._theme.color("status.error")
        return None


def _text(row: RunRow, name: str) -> str:
    return {
        "run": str(row.run_id),
        "title": row.title,
        "tokens": f"{row.tokens:,}",
        "acceptance": significant(row.acceptance),
        "speed": significant(row.tokens_per_second),
        "stop": row.stop,
        "marks": ", ".join(row.marks),
    }[name]
