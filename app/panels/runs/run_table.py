"""Tables of runs: those of all models of a session and of earlier ones, with folding lines; and the
figures of two runs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, Qt, Signal

from app.looks import OVERLAY_ROLES, Theme, icon
from app.trace_models.compared_lanes import lanes_of
from app.trace_models.run_comparison import FigurePair
from app.trace_models.run_facts import ModelRuns, RunRow, run_row
from app.trace_models.run_notes import count_runs, notes_of, number_of
from app.trace_models.shown_text import NOT_OBSERVED, significant
from app.widgets.plain_table import ColumnTable, TableColumn, bold
from engine.analysis.findings.run_rows import lane_kind
from engine.trace.records import PEER, POLICY, REFERENCE
from engine.trace.run_ref import RunRef

OPEN, FOLDED = "▾", "▸"


@dataclass(frozen=True, slots=True)
class RunLine:
    """key: its identity. title: of a folder, or the name of a run. row: figures of a run, for a
    comparison those of its shown lane; None for a folder. is_open: whether the lines below it are
    listed, None if there are none."""

    key: Hashable
    depth: int
    title: str
    row: RunRow | None = None
    is_open: bool | None = None


class RunTree:
    """Which lines are folded: comparisons are until they are opened, all others are open."""

    def __init__(self) -> None:
        self._toggled: set[Hashable] = set()

    def toggle(self, line: RunLine) -> None:
        self._toggled ^= {line.key}

    def lines(
        self, rows: Sequence[RunRow], found: Collection[RunRef], *, with_models: bool, whole: bool
    ) -> list[RunLine]:
        """Lines of the rows found. rows: in order of starting, grouped by model. with_models:
        models are folders. whole: nothing is folded."""
        tree = _Tree(self._toggled, found, whole)
        by_model: dict[str, list[RunRow]] = {}
        for row in rows:
            by_model.setdefault(row.model, []).append(row)
        if not with_models:
            return [line for of_model in by_model.values() for line in tree.of_model(of_model, 0)]
        lines: list[RunLine] = []
        for model, of_model in by_model.items():
            lines += tree.folder(("model", model), 0, model, list(tree.of_model(of_model, 1)))
        return lines


class _Tree:
    def __init__(
        self, toggled: Collection[Hashable], found: Collection[RunRef], whole: bool
    ) -> None:
        self._toggled, self._found, self._whole = toggled, found, whole

    def _is_open(self, key: Hashable, usual: bool) -> bool:
        return self._whole or usual is not (key in self._toggled)

    def folder(
        self, key: Hashable, depth: int, title: str, below: list[RunLine]
    ) -> Iterator[RunLine]:
        """A folder and its lines; nothing if it is empty."""
        if below:
            is_open = self._is_open(key, True)
            yield RunLine(key, depth, title, is_open=is_open)
            if is_open:
                yield from below

    def of_model(self, rows: Sequence[RunRow], depth: int) -> Iterator[RunLine]:
        """Runs and comparisons in order; those of a scenario at its first one."""
        groups, forks = _grouped(rows)
        by_scenario: dict[RunRef | str, list[list[RunRow]]] = {}
        for group in groups:
            first = group[0].run
            by_scenario.setdefault(notes_of(first.facts).scenario or first, []).append(group)
        for title, some in by_scenario.items():
            if isinstance(title, RunRef):
                yield from self._group(some[0], forks, depth)
                continue
            below = [line for one in some for line in self._group(one, forks, depth + 1)]
            yield from self.folder(("scenario", rows[0].model, title), depth, title, below)

    def _group(
        self, group: list[RunRow], forks: dict[RunRef, list[RunRow]], depth: int
    ) -> Iterator[RunLine]:
        first = group[0]
        if len(group) == 1 and first.run.facts.lane != REFERENCE:
            yield from self._run(first, forks, depth)
            return
        lanes = [row for row in group if row.run in self._found]
        if not lanes:
            return
        policies = [one for one in group if lane_kind(one.run.facts) in (POLICY, PEER)]
        row = next(iter(policies), first)  # as run_to_show has it
        names = [one.run.facts.lane or "" for one in policies]
        what = f"compare {', '.join(names) or 'lanes'}"
        marks = tuple(dict.fromkeys(mark for one in group for mark in one.marks))
        stop = next((one.stop for one in group if not one.ended), row.stop)
        is_open = self._is_open(("lanes", first.run), False)
        whole = replace(row, drafter=what, marks=marks, stop=stop)
        yield RunLine(("lanes", first.run), depth, called(row), whole, is_open)
        for lane in lanes if is_open else ():
            yield RunLine(lane.run, depth + 1, lane.name, lane)

    def _run(self, row: RunRow, forks: dict[RunRef, list[RunRow]], depth: int) -> Iterator[RunLine]:
        is_listed = row.run in self._found
        below = [
            line
            for fork in forks.get(row.run, ())
            for line in self._run(fork, forks, depth + is_listed)
        ]
        if is_listed:
            is_open = self._is_open(row.run, True) if below else None
            yield RunLine(row.run, depth, called(row), row, is_open)
            if not is_open:
                return
        yield from below


def called(row: RunRow) -> str:
    """A run's name, else its number."""
    return row.name or str(row.number)


def _grouped(rows: Sequence[RunRow]) -> tuple[list[list[RunRow]], dict[RunRef, list[RunRow]]]:
    """Top-level runs, with the lanes of a comparison together; forks by the run that they continue,
    if that is listed."""
    known = {row.run for row in rows}
    groups: list[list[RunRow]] = []
    forks: dict[RunRef, list[RunRow]] = {}
    for row in rows:
        facts = row.run.facts
        parent = None if facts.fork is None else row.run.sibling(facts.fork.parent)
        before = groups[-1][-1].run if groups else None
        goes_on = (
            before is not None and before.store is row.run.store and before.facts.lane is not None
        )
        if parent in known and parent is not None and parent.run_id < row.run.run_id:
            forks.setdefault(parent, []).append(row)
        elif facts.lane not in (None, REFERENCE) and goes_on:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups, forks


_COLUMNS = (
    TableColumn("run", "run", "Name of the run (F2 to rename), else its number", True),
    TableColumn("drafter", "lane or drafters", "Lane of a comparison, else the drafters", True),
    TableColumn("acceptance", "accept.", "Acceptance: accepted / drafted"),
    TableColumn(
        "speed",
        "tok/s",
        "Generated tokens per second, without prompts; none for lanes, which share drafts",
    ),
    TableColumn("seconds", "time", "Time of its rounds, including prompts, without pauses"),
    TableColumn("star", "★", "Starred runs; click to add or remove a star", True),
    TableColumn("started", "started", "Start of the run: the time if today, else the day", True),
    TableColumn("prompt", "prompt", "Start of the first prompt", True),
    TableColumn("policy", "rollback", "Rollback policy, if the run drafts", True),
    TableColumn("n_max", "n_max", "Longest draft"),
    TableColumn("tokens", "tokens", "Tokens generated, all sequences"),
    TableColumn("stop", "stop", "Why the run ended", True),
    TableColumn("marks", "marks", "Why the output is not the model's", True),
)
_INDENT = "   "
_SEARCHED = ("run", "prompt", "drafter", "policy", "stop", "marks")
_Index = QModelIndex | QPersistentModelIndex


class RunTable(ColumnTable):
    """Lines of a RunTree, runs in order of starting. With runs of several models, or of earlier
    sessions, each model is a folder. Deleted runs and those that do not match a search are left
    out."""

    renamed = Signal(object, str)  # RunRef and what it is to be called

    columns = _COLUMNS

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.lines: list[RunLine] = []
        """The lines of the table, from the top."""
        self.rows: list[RunRow] = []
        """Every matching run, also in folded lines."""
        self._tree = RunTree()
        self.n_known = 0
        """Runs and comparisons that are not deleted."""
        self._recorded: Sequence[ModelRuns] = ()
        self._known: dict[RunRef, RunRow] = {}
        self._query: tuple[str, ...] = ()
        self._starred_only = False
        self.shown: RunRef | None = None
        self._overlaid: tuple[RunRef, ...] = ()
        self._theme = theme
        theme.apply(self._recolour)

    @property
    def overlaid(self) -> RunRef | None:
        """The run compared with the one on show, None without one."""
        return next(iter(self._overlaid), None)

    def set_overlaid(self, runs: Sequence[RunRef]) -> None:
        """Mark the overlaid runs."""
        self._overlaid = tuple(runs)
        self.refresh()

    def can_overlay(self, run: RunRef) -> bool:
        """Whether a run may be overlaid: any other than the one on show."""
        return self.shown is not None and run != self.shown

    def other(self, chosen: RunRef | None) -> RunRef | None:
        """The run to overlay by default: the chosen one, else the newest other; for a lane another
        lane."""
        others = [row.run for row in self.rows if self.can_overlay(row.run)]
        if chosen in others:
            return chosen
        own = [run for run in others if self.shown is not None and run.store is self.shown.store]
        is_lane = self.shown is not None and self.shown.facts.lane is not None
        alike = [run for run in own or others if (run.facts.lane is not None) is is_lane]
        return next(reversed(alike or own or others), None)

    def set_recorded(self, recorded: Sequence[ModelRuns]) -> None:
        """List the runs of these models, unless the run on show belongs to another trace."""
        self._recorded = recorded
        self.refresh()

    def show_run(self, run: RunRef | None) -> None:
        self.shown = run
        self.refresh()

    def search(self, words: str, *, starred_only: bool) -> None:
        """List only the runs that contain all of these words."""
        self._query, self._starred_only = tuple(words.casefold().split()), starred_only
        self.refresh()

    def _traces(self) -> Sequence[ModelRuns]:
        """The traces to list: those that were set, or another one that is on show alone."""
        shown = self.shown
        if shown is None or any(runs.store is shown.store for runs in self._recorded):
            return self._recorded
        return (ModelRuns("", shown.store),)

    def refresh(self) -> None:
        """Add new runs, and update the others."""
        known, self._known = self._known, {}
        for runs in self._traces():
            on_disk = runs.store.rows_in is not None
            for run_id in range(len(runs.store.runs)):
                run = RunRef(runs.store, run_id)
                notes, row = notes_of(run.facts), known.get(run)
                if notes.deleted:
                    continue
                shown = on_disk, number_of(run), notes.name, notes.starred, runs.model
                if (
                    row is None
                    or not row.ended
                    or shown != (row.on_disk, row.number, row.name, row.starred, row.model)
                ):
                    row = run_row(run, runs.model)
                self._known[run] = row
        self.n_known = count_runs(self._known)
        self._lay_out()

    def toggle(self, line: int) -> None:
        if self.lines[line].is_open is not None:
            self._tree.toggle(self.lines[line])
            self._lay_out()

    def parent_of(self, line: int) -> int | None:
        """The parent of a line, None at the top level."""
        depth = self.lines[line].depth
        return next((i for i in range(line - 1, -1, -1) if self.lines[i].depth < depth), None)

    def _lay_out(self) -> None:
        known = list(self._known.values())
        by_model = {row.model: None for row in known}
        with_models = len(by_model) > 1 or any(runs.is_earlier for runs in self._recorded)
        self.rows = [
            row for model in by_model for row in known if row.model == model and self._is_found(row)
        ]
        found = {row.run for row in self.rows}
        whole = bool(self._query) or self._starred_only  # some may be hidden: nothing is folded
        lines = self._tree.lines(known, found, with_models=with_models, whole=whole)
        outline = [(line.key, line.is_open) for line in lines]
        if outline != [(line.key, line.is_open) for line in self.lines]:
            self.beginResetModel()
            self.lines = lines
            self.endResetModel()
        elif lines:
            self.lines = lines
            last = self.index(len(lines) - 1, len(_COLUMNS) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def _is_found(self, row: RunRow) -> bool:
        if self._starred_only and not row.starred:
            return False
        if not self._query:
            return True
        words = [row.model, *(_text(row, name) for name in _SEARCHED)]
        said = "\n".join(words).casefold()
        return all(word in said for word in self._query)

    def run_at(self, line: int) -> RunRef | None:
        """The run of a line, for a comparison its shown lane; None for a folder."""
        row = self.lines[line].row
        return None if row is None else row.run

    def line_of(self, run: RunRef | None) -> int | None:
        """The line of a run, else that of its comparison; None if it is folded or does not
        match."""
        lines = enumerate(self.lines)
        found = [i for i, line in lines if line.row is not None and line.row.run == run]
        if not found and run is not None and (lanes := lanes_of(run)):
            key = "lanes", lanes[0]
            found = [i for i, line in enumerate(self.lines) if line.key == key]
        return found[-1] if found else None

    def _recolour(self) -> None:
        theme = self._theme
        self._shown_icon = icon("run", theme, "ui.accent")
        self._overlaid_icons = [icon("overlay", theme, role) for role in OVERLAY_ROLES]
        self.layoutChanged.emit()

    def n_rows(self) -> int:
        return len(self.lines)

    def flags(self, index: _Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        is_run = self.lines[index.row()].row is not None
        return flags | Qt.ItemFlag.ItemIsEditable if is_run and index.column() == 0 else flags

    def setData(self, index: _Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        row = self.lines[index.row()].row
        if row is None or role != Qt.ItemDataRole.EditRole:
            return False
        name = " ".join(str(value).split())
        self.renamed.emit(row.run, "" if name == str(row.number) else name)
        return True

    def cell(self, row: int, name: str, role: int) -> Any:
        line = self.lines[row]
        if role == Qt.ItemDataRole.DisplayRole and name == "run":
            return _title(line)
        if line.row is None:
            return self._heading(line, name, role)
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return (
                _tip(line.row, name)
                if role == Qt.ItemDataRole.ToolTipRole
                else _text(line.row, name)
            )
        if role == Qt.ItemDataRole.EditRole:
            return line.row.name
        if role == Qt.ItemDataRole.DecorationRole and name == "run":
            if line.row.run == self.shown:
                return self._shown_icon
            icons = dict(zip(self._overlaid, self._overlaid_icons, strict=False))
            return icons.get(line.row.run)
        if role == Qt.ItemDataRole.FontRole and line.row.run == self.shown:
            return bold()
        if role == Qt.ItemDataRole.ForegroundRole:
            if line.row.marks:
                return self._theme.color("status.error")
            return self._theme.color("ui.muted") if line.row.on_disk else None
        return None

    def _heading(self, line: RunLine, name: str, role: int) -> Any:
        if name == "run" and role == Qt.ItemDataRole.ToolTipRole:
            return line.title
        return bold() if role == Qt.ItemDataRole.FontRole else None


def _title(line: RunLine) -> str:
    fold = {None: "", True: f"{OPEN} ", False: f"{FOLDED} "}[line.is_open]
    return f"{_INDENT * line.depth}{fold}{line.title}"


def _text(row: RunRow, name: str) -> str:
    return {
        "run": called(row),
        "star": "★" if row.starred else "",
        "prompt": row.prompt,
        "drafter": row.drafter,
        "policy": row.policy,
        "n_max": "" if row.n_max is None else str(row.n_max),
        "tokens": NOT_OBSERVED if row.tokens is None else f"{row.tokens:,}",
        "acceptance": significant(row.acceptance),
        "speed": significant(row.tokens_per_second),
        "seconds": NOT_OBSERVED if row.seconds is None else _seconds(row.seconds),
        "started": "" if row.started is None else _when(row.started),
        "stop": row.stop,
        "marks": ", ".join(row.marks),
    }[name]


def _tip(row: RunRow, name: str) -> str:
    if name == "started" and row.started is not None:
        return f"{row.started:%Y-%m-%d %H:%M:%S}"
    if name == "run":
        return f"{called(row)}: {row.run} of its trace"
    return _text(row, name)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.{1 if seconds < 100 else 0}f} s"


def _when(started: datetime) -> str:
    today = datetime.now(started.tzinfo).date()
    return f"{started:%H:%M}" if started.date() == today else f"{started:%b %d}"


_SHORT = 24
"""Most characters of both names in a heading."""


class RunPairTable(ColumnTable):
    """Rows are figures."""

    columns = (TableColumn("", "", ""),) * 4
    _runs = ("", "")

    def show_pairs(self, runs: tuple[str, str], pairs: list[FigurePair]) -> None:
        """Show these figures of two runs with these names."""
        same_lines = [p.label for p in pairs] == [p.label for p in self.rows]
        if same_lines and runs == self._runs:
            self.rows = pairs
            self.dataChanged.emit(self.index(0, 1), self.index(len(pairs) - 1, 3))
            return
        self._runs = runs
        both = " / ".join(name.removeprefix("run ") for name in runs)
        ratio = both if len(both) <= _SHORT else "ratio"
        titles = ("figure", "figure"), *((name, name) for name in runs), (ratio, both)
        columns = [TableColumn(str(i), *names, i == 0) for i, names in enumerate(titles)]
        self.show_rows(pairs, columns)

    def cell(self, row: int, name: str, role: int) -> Any:
        pair = self.rows[row]
        if role == Qt.ItemDataRole.ToolTipRole:
            return pair.tip
        if role == Qt.ItemDataRole.DisplayRole:
            return (pair.label, pair.text(0), pair.text(1), pair.ratio_text)[int(name)]
        return None
