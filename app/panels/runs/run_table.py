"""The runs of all models of a session, and of earlier ones, as a table in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QFont

from app.looks.theme import Theme, icon
from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.number_text import NOT_OBSERVED, significant
from app.trace_models.run_facts import ModelRuns, RunRow, run_row
from app.trace_models.run_notes import notes_of
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_COLUMNS = (
    TableColumn("run", "run", "What you call the run (F2), else its number in its trace", True),
    TableColumn("star", "★", "Starred runs; a click puts a star or takes it off", True),
    TableColumn("prompt", "prompt", "How the first prompt begins", True),
    TableColumn("drafter", "lane or drafters", "Lane of a comparison, else what drafts", True),
    TableColumn("policy", "rollback", "Rollback policy of a run that drafts", True),
    TableColumn("n_max", "n_max", "Longest draft"),
    TableColumn("tokens", "tokens", "Tokens generated, all sequences"),
    TableColumn("acceptance", "acceptance", "Accepted / drafted"),
    TableColumn(
        "speed",
        "tok/s",
        "Tokens generated a second, prompts left out; lanes share their drafts and have none",
    ),
    TableColumn("started", "started", "When the run began", True),
    TableColumn("stop", "stop", "Why the run ended", True),
    TableColumn("marks", "marks", "Why the output is not the model's own", True),
)
_SEARCHED = ("run", "prompt", "drafter", "policy", "stop", "marks")
_Index = QModelIndex | QPersistentModelIndex


class RunTable(ColumnTable):
    """Runs by model, in the order of starting. With runs of several models, or of earlier sessions,
    each model has a line of its own above them. Deleted ones are left out, and so are those that a
    search does not find."""

    renamed = Signal(object, str)  # RunRef and what it is to be called

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
        self.lines: list[RunRow | str] = []
        """What the table shows, from above: runs, and names of groups."""
        self.rows: list[RunRow] = []
        """The runs among them."""
        self.n_known = 0
        """Runs that are not deleted."""
        self._recorded: Sequence[ModelRuns] = ()
        self._known: dict[RunRef, RunRow] = {}
        self._query: tuple[str, ...] = ()
        self._starred_only = False
        self._shown: RunRef | None = None
        self._overlaid: RunRef | None = None
        self.retheme(theme)

    @property
    def shown(self) -> RunRef | None:
        """The run that the other views show."""
        return self._shown

    @property
    def overlaid(self) -> RunRef | None:
        """The run that is drawn over the one on show, None without one."""
        return self._overlaid

    def set_overlaid(self, run: RunRef | None) -> None:
        """Mark the run that lies over the one on show."""
        self._overlaid = run
        self.refresh()

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
        self.refresh()

    def search(self, words: str, *, starred_only: bool) -> None:
        """List the runs alone in which all of these words occur."""
        self._query, self._starred_only = tuple(words.casefold().split()), starred_only
        self.refresh()

    def _traces(self) -> Sequence[ModelRuns]:
        """The traces to list: those at hand, or one that is on show and not among them."""
        shown = self._shown
        if shown is None or self.recorded_in(shown.store) is not None:
            return self._recorded
        return (ModelRuns("", shown.store),)

    def refresh(self) -> None:
        """Take in new runs, and whatever of a run may have changed."""
        known, self._known = self._known, {}
        for runs in self._traces():
            on_disk = runs.on_disk is not None
            for run_id in range(len(runs.store.runs)):
                run = RunRef(runs.store, run_id)
                notes, row = notes_of(run.facts), known.get(run)
                if notes.deleted:
                    continue
                told = on_disk, notes.name, notes.starred, runs.model
                if (
                    row is None
                    or not row.ended
                    or told != (row.on_disk, row.name, row.starred, row.model)
                ):
                    row = run_row(run, runs.model, on_disk=on_disk)
                self._known[run] = row
        self.n_known = len(self._known)
        lines = self._lines()
        if [_key(line) for line in lines] != [_key(line) for line in self.lines]:
            self.beginResetModel()
            self._take(lines)
            self.endResetModel()
        elif lines:
            self._take(lines)
            last = self.index(len(lines) - 1, len(_COLUMNS) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def _take(self, lines: list[RunRow | str]) -> None:
        self.lines = lines
        self.rows = [line for line in lines if isinstance(line, RunRow)]

    def _lines(self) -> list[RunRow | str]:
        groups: dict[str, list[RunRow]] = {}
        for row in self._known.values():
            groups.setdefault(row.model, [])
            if self._is_found(row):
                groups[row.model].append(row)
        if len(groups) < 2 and not any(runs.is_earlier for runs in self._recorded):
            return [row for rows in groups.values() for row in rows]
        lines: list[RunRow | str] = []
        for name, rows in groups.items():
            lines += [name, *rows] if rows else []
        return lines

    def _is_found(self, row: RunRow) -> bool:
        if self._starred_only and not row.starred:
            return False
        if not self._query:
            return True
        words = [row.model, *(_text(row, name) for name in _SEARCHED)]
        said = "\n".join(words).casefold()
        return all(word in said for word in self._query)

    def run_at(self, line: int) -> RunRef | None:
        """The run of a line, None for the name of a group."""
        row = self.lines[line]
        return row.run if isinstance(row, RunRow) else None

    def line_of(self, run: RunRef | None) -> int | None:
        """The line of a run, None where the list lacks it."""
        found = (
            i for i, row in enumerate(self.lines) if isinstance(row, RunRow) and row.run == run
        )
        return next(found, None)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self._shown_icon = icon("run", theme, "ui.accent")
        self._overlaid_icon = icon("overlay", theme, "plot.overlay")
        self.layoutChanged.emit()

    def n_rows(self) -> int:
        return len(self.lines)

    def flags(self, index: _Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        if isinstance(self.lines[index.row()], str):
            return Qt.ItemFlag.NoItemFlags  # arrow keys go from run to run
        return flags | Qt.ItemFlag.ItemIsEditable if index.column() == 0 else flags

    def setData(self, index: _Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        run = self.run_at(index.row())
        if run is None or role != Qt.ItemDataRole.EditRole:
            return False
        name = " ".join(str(value).split())
        self.renamed.emit(run, "" if name == str(run.run_id) else name)
        return True

    def cell(self, row: int, name: str, role: int) -> Any:
        line = self.lines[row]
        if isinstance(line, str):
            return self._heading(line, name, role)
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return _text(line, name)
        if role == Qt.ItemDataRole.EditRole:
            return line.name
        if role == Qt.ItemDataRole.DecorationRole and name == "run":
            icons = {self._overlaid: self._overlaid_icon, self._shown: self._shown_icon}
            return icons.get(line.run)
        if role == Qt.ItemDataRole.FontRole and line.run == self._shown:
            return _bold()
        if role == Qt.ItemDataRole.ForegroundRole:
            if line.marks:
                return self._theme.color("status.error")
            return self._theme.color("ui.muted") if line.on_disk else None
        return None

    def _heading(self, group: str, name: str, role: int) -> Any:
        if name == "run" and role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return group
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._theme.color("ui.text")  # what takes no part is greyed else
        return _bold() if role == Qt.ItemDataRole.FontRole else None


def _key(line: RunRow | str) -> RunRef | str:
    return line if isinstance(line, str) else line.run


def _bold() -> QFont:
    font = QFont()
    font.setBold(True)
    return font


def _text(row: RunRow, name: str) -> str:
    return {
        "run": row.name or str(row.run.run_id),
        "star": "★" if row.starred else "",
        "prompt": row.prompt,
        "drafter": row.drafter,
        "policy": row.policy,
        "n_max": "" if row.n_max is None else str(row.n_max),
        "tokens": NOT_OBSERVED if row.tokens is None else f"{row.tokens:,}",
        "acceptance": significant(row.acceptance),
        "speed": significant(row.tokens_per_second),
        "started": "" if row.started is None else f"{row.started:%Y-%m-%d %H:%M:%S}",
        "stop": row.stop,
        "marks": ", ".join(row.marks),
    }[name]
