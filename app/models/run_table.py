"""The runs of all models of a session as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QFont

from app.looks.theme import Theme, icon
from app.models.column_table import ColumnTable, TableColumn
from app.models.number_text import NOT_OBSERVED, significant
from app.models.run_facts import ModelRuns, RunRow, run_row
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_COLUMNS = (
    TableColumn("run", "run", "Number of the run, in the order of starting with its model"),
    TableColumn("model", "model", "Model that ran", True),
    TableColumn("title", "lane or drafters", "Lane of a comparison, else what drafts", True),
    TableColumn("tokens", "tokens", "Tokens generated, all sequences"),
    TableColumn("acceptance", "acceptance", "Accepted / drafted"),
    TableColumn("speed", "tok/s", "Tokens generated a second, prompts left out"),
    TableColumn("stop", "stop", "Why the run ended", True),
    TableColumn("marks", "marks", "Why the output is not the model's own", True),
)


class RunTable(ColumnTable):
    """Runs by model, in the order of starting; those that the user hid are left out."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
        self.rows: list[RunRow] = []
        self._recorded: Sequence[ModelRuns] = ()
        self._hidden: set[RunRef] = set()
        self._shown: RunRef | None = None
        self._overlaid: RunRef | None = None
        self.retheme(theme)

    @property
    def n_hidden(self) -> int:
        return len(self._hidden)

    @property
    def shown(self) -> RunRef | None:
        """The run that the other views show."""
        return self._shown

    @property
    def overlaid(self) -> RunRef | None:
        """The run that is drawn over the one on show, None without one."""
        return self._overlaid

    def set_overlaid(self, run: RunRef | None) -> None:
        """Mark the run that lies over the one on show, and list it even if it was hidden."""
        self._overlaid = run
        self._list(run)

    def can_overlay(self, run: RunRef) -> bool:
        """Whether a run may be laid over the one on show: any other one."""
        return self._shown is not None and run != self._shown

    def other(self, chosen: RunRef | None) -> RunRef | None:
        """A run to lay over the one on show: the chosen one, else the newest other."""
        others = [row.run for row in self.rows if self.can_overlay(row.run)]
        if chosen in others:
            return chosen
        own = [run for run in others if self._shown is not None and run.store is self._shown.store]
        return next(reversed(own or others), None)

    @property
    def n_models(self) -> int:
        """Models that have runs in the list."""
        return len({id(row.run.store) for row in self.rows})

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        """List the runs of these models, unless the run on show is of no such trace."""
        self._recorded = recorded
        self.refresh()

    def recorded_in(self, store: TraceStore) -> ModelRuns | None:
        """The model or the opened trace that some runs are listed under, None where none is."""
        return next((runs for runs in self._recorded if runs.store is store), None)

    def show_run(self, run: RunRef | None) -> None:
        """Mark the run on show."""
        self._shown = run
        self._list(run)

    def _list(self, run: RunRef | None) -> None:
        if run is not None:
            self._hidden.discard(run)
        self.refresh()

    def _traces(self) -> Sequence[ModelRuns]:
        """The traces to list: those at hand, or one that is on show and not among them."""
        shown = self._shown
        if shown is None or self.recorded_in(shown.store) is not None:
            return self._recorded
        return (ModelRuns("", shown.store),)

    def refresh(self) -> None:
        """Take in new runs, and the figures of those that had not ended."""
        known = {row.run: row for row in self.rows}
        found = [
            (RunRef(runs.store, run_id), runs.model)
            for runs in self._traces()
            for run_id in range(len(runs.store.runs))
        ]
        self._hidden &= {run for run, _ in found}  # and nothing of a trace that was closed is held
        wanted = [(run, model) for run, model in found if run not in self._hidden]
        if [run for run, _ in wanted] != list(known):
            self.beginResetModel()
            self.rows = [known.get(run) or run_row(run, model) for run, model in wanted]
            self.endResetModel()
        for i, row in enumerate(self.rows):
            if not row.ended:
                self.rows[i] = run_row(row.run, row.model)
        if self.rows:
            last = self.index(len(self.rows) - 1, len(_COLUMNS) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def hide_run(self, run: RunRef) -> None:
        """Leave a run out of the list; it stays in the trace. Not the one on show."""
        if run != self._shown:
            self._hidden.add(run)
            self.refresh()

    def show_all(self) -> None:
        """List the hidden runs again."""
        self._hidden.clear()
        self.refresh()

    def row_of(self, run: RunRef | None) -> int | None:
        """The row of a run, None where the list lacks it."""
        return next((i for i, row in enumerate(self.rows) if row.run == run), None)

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
            return icons.get(run.run)
        if role == Qt.ItemDataRole.FontRole and run.run == self._shown:
            font = QFont()
            font.setBold(True)
            return font
        if role == Qt.ItemDataRole.ForegroundRole and run.marks:
            return self._theme.color("status.error")
        return None


def _text(row: RunRow, name: str) -> str:
    return {
        "run": str(row.run.run_id),
        "model": row.model,
        "title": row.title,
        "tokens": NOT_OBSERVED if row.tokens is None else f"{row.tokens:,}",
        "acceptance": significant(row.acceptance),
        "speed": significant(row.tokens_per_second),
        "stop": row.stop,
        "marks": ", ".join(row.marks),
    }[name]
