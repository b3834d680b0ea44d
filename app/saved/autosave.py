"""Autosave of the session's traces, every half minute, and the traces of earlier sessions.

A window writes each trace to a folder of its own, held by a lock file that names its process. A
clean exit keeps them for the next start, except those that the user discards; a folder without a
held lock belongs to an earlier session. Lists use session.json; rows are read when a run is to be
shown.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject, Signal

from app.engine_thread.events import TraceMark, failure, mark_of
from app.engine_thread.feed import timer
from app.engine_thread.jobs.files import ExportTrace, SaveTrace
from app.engine_thread.worker import SideJob
from app.saved.errors import log
from app.saved.settings import hold, is_held, lock_path, unwritable
from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import SOURCE, notes_of
from engine.errors import DraftscopeError
from engine.long_work import ReportProgress
from engine.trace.export import SESSION_FILE, SavedRows, append_csv, recover_export
from engine.trace.replacing import target_of
from engine.trace.run_ref import RunRef
from engine.trace.session_file import change_facts, read_session
from engine.trace.store import TraceStore

PERIOD_MS = 30_000
SOON_MS = 2000
EARLY_MS = 5000
PREFIX = "session-"
"""Prefix of the folders' names, followed by the time: sorted by age."""
_JOIN_TIMEOUT = 5.0


@dataclass
class _SavedTrace:
    """The autosave of one trace. saved, exported: how much of it the folder and exports hold. rows:
    those in the folder, after which new ones can be appended. is_earlier: the trace is from an
    earlier session, about which the user is not asked."""

    folder: Path
    lock: QLockFile | None = None
    saved: TraceMark | None = None
    rows: SavedRows | None = None
    exported: TraceMark | None = None
    is_earlier: bool = False


class Autosave(QObject):
    """Saves those of `stores` that have grown. `folder`: parent of all autosaves. `is_busy`:
    whether a run is active."""

    saved = Signal()
    failed = Signal(object)  # DraftscopeError; sent once, until something could be saved again
    _posted = Signal(object)

    def __init__(
        self,
        folder: Path,
        stores: Callable[[], Sequence[TraceStore]],
        parent: QObject,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(parent)
        self._parent_folder = folder
        self._name = time.strftime(f"{PREFIX}%Y%m%d-%H%M%S") + f"-{os.getpid()}-{id(self):x}"
        self._stores, self._is_busy = stores, is_busy
        self._copies: dict[TraceStore, _SavedTrace] = {}
        self._waiting: list[TraceStore] = []
        self._job: SaveTrace | None = None
        self.problem: DraftscopeError | None = None
        """Why the last save failed."""
        self._timer = timer(self, self.save, PERIOD_MS)
        self._soon = timer(self, self._save_at_rest, SOON_MS, once=True)
        self._early = timer(self, self.save, EARLY_MS, once=True)
        self._posted.connect(self._receive)

    def start(self) -> None:
        """Save every half minute from now on."""
        self._timer.start()

    def save_soon(self) -> None:
        """Save shortly: a run has ended, which a crash would lose."""
        self._soon.start()

    def save_early(self) -> None:
        """A run has started: save it before the half minute is over, if it is still active by then;
        for ended runs see `save_soon`."""
        self._early.start()

    def folder_of(self, store: TraceStore) -> Path:
        """The folder of a trace."""
        return self._copy(store).folder

    def take(self, store: TraceStore) -> None:
        """Register a trace of an earlier session, whose rows are on disk."""
        assert store.rows_in is not None
        self._copies[store] = _SavedTrace(store.rows_in, saved=mark_of(store), is_earlier=True)

    def note_reading(self, store: TraceStore) -> None:
        """Note that a trace was read from its folder, and equals it."""
        self._copy(store).saved = mark_of(store)

    def unexported(self) -> list[TraceStore]:
        """Traces of this session with rows that were never exported."""
        return [
            store
            for store in self._stores()
            if not self._copy(store).is_earlier and self._mark(store) != self._copy(store).exported
        ]

    def unsaved(self) -> list[TraceStore]:
        """Traces whose newest rows are in none of this program's folders."""
        return [store for store in self._stores() if not self.is_saved(store)]

    def is_saved(self, store: TraceStore) -> bool:
        """Whether all of a trace is in its folder."""
        return self._copy(store).saved == self._mark(store)

    @property
    def is_writing(self) -> bool:
        """Whether a trace is being written."""
        return self._job is not None

    def note_facts(self, run: RunRef, fact: str) -> None:
        """Write a changed fact of a run, at once if the run is in a folder. Raises
        TraceFileError."""
        copy = self._copy(run.store)
        if copy.saved is not None and not self.is_writing:
            change_facts(copy.folder, {run.run_id: run.facts.pick(fact)})
        elif run.store.rows_in is None:
            copy.saved = None

    def _mark(self, store: TraceStore) -> TraceMark | None:
        """The size of a trace; if its rows are not in memory, the saved size."""
        is_known = store.rows_in is None and store.size()
        return mark_of(store) if is_known else self._copy(store).saved

    def note_export(self, export: ExportTrace) -> None:
        """Note that rows up to its mark were exported to a folder of the user's choice."""
        if not export.runs:  # otherwise the other runs exist nowhere
            self._copy(export.store).exported = export.mark

    def save(self) -> None:
        """Write unsaved rows now, on a thread, unless that is happening already."""
        if self._job is None:
            self._waiting = self.unsaved()
            self._save_next()

    def keep(self, but: Collection[TraceStore] = ()) -> DraftscopeError | None:
        """Write unsaved rows of all traces but some, and wait; returns the error, if any."""
        self._join()
        for store in self.unsaved():
            if store in but:
                continue
            try:
                self._make_room(store)
                mark = mark_of(store)
                copy = self._copy(store)
                copy.rows = append_csv(store, copy.folder, copy.rows)
            except Exception as error:
                self.problem = failure(error)
                return self.problem
            self._copy(store).saved = mark
        return None

    def close(self, *, discarded: Collection[TraceStore] = ()) -> None:
        """A clean exit: saved traces stay for the next start, except discarded ones."""
        self._timer.stop()
        self._soon.stop()
        self._early.stop()
        self._join()
        for store, copy in self._copies.items():
            if store in discarded and (copy.lock is not None or copy.is_earlier):
                shutil.rmtree(copy.folder, ignore_errors=True)
            if copy.lock is not None:
                copy.lock.unlock()
        self._copies.clear()

    def _copy(self, store: TraceStore) -> _SavedTrace:
        if store not in self._copies:
            number = len(self._copies) + 1
            name = self._name if number == 1 else f"{self._name}-{number}"
            self._copies[store] = _SavedTrace(self._parent_folder / name)
        return self._copies[store]

    def _make_room(self, store: TraceStore) -> None:
        """Create and lock the folder of a trace. Raises DraftscopeError if it is not writable."""
        copy = self._copy(store)
        if copy.lock is None:
            problem = unwritable(self._parent_folder)
            copy.lock = None if problem else hold(copy.folder)
            if copy.lock is None:
                raise DraftscopeError(
                    problem or f"{lock_path(copy.folder)} cannot be made.",
                    "Export the runs to another folder (Ctrl+E).",
                )

    def _save_at_rest(self) -> None:
        if not self._is_busy():  # deferred, because writing would slow the next run down
            self.save()

    def _save_next(self) -> None:
        if self._waiting:
            store = self._waiting.pop(0)
            try:
                self._make_room(store)
            except DraftscopeError as error:
                self._tell(failure(error))
            else:
                copy = self._copy(store)
                self._job = SaveTrace(store, copy.folder, copy.rows)
                self._job.start(self._posted.emit)

    def _join(self) -> None:
        self._waiting = []
        if self._job is not None:
            self._job.cancelled.set()
            self._job.join(_JOIN_TIMEOUT)
            self._job = None

    def _receive(self, export: SaveTrace) -> None:
        if export.failed is not None:
            self._waiting = []
            self._tell(export.failed)
        self._job = None
        if export.is_complete:
            copy = self._copy(export.store)
            copy.saved, copy.rows = export.mark, export.saved
            self.problem = None
            self.saved.emit()
        self._save_next()

    def _tell(self, problem: DraftscopeError) -> None:
        log.warning("autosave: %s %s", problem.message, problem.remedy)
        if self.problem is None:
            self.failed.emit(problem)
        self.problem = problem


def discard(folder: Path) -> None:
    """Delete an autosave whose lock is not held."""
    shutil.rmtree(folder, ignore_errors=True)
    lock_path(folder).unlink(missing_ok=True)


def in_use(folder: Path) -> bool:
    """Whether a running window writes here; a stage of an export belongs to its session's lock."""
    return is_held(target_of(folder) or folder)


INTERRUPTED = "interrupted"
"""End of a run whose window ended first."""


DamagedTrace = tuple[Path, DraftscopeError]
"""A damaged folder of the library, and its error."""


class ReadLibrary(SideJob):
    """Read the runs of earlier sessions, oldest first; posts each of them."""

    def __init__(self, folder: Path, post: Callable[[ModelRuns | DamagedTrace], None]) -> None:
        super().__init__()
        self._folder, self._post = folder, post

    def run(self, progress: ReportProgress) -> None:
        for path in saved_folders(self._folder):
            if self.cancelled.is_set():
                break
            try:
                found = read_saved(path)
            except BaseException as error:  # a damaged one does not hide the others
                self._post((path, failure(error)))
                continue
            if found is None:
                discard(path)
            else:
                self._post(found)


def saved_folders(folder: Path) -> list[Path]:
    """Traces that no running window writes, oldest first.

    An interrupted replacement is recovered first; half-written ones are deleted.
    """
    try:
        for target in {found for path in folder.iterdir() if (found := target_of(path))}:
            if not in_use(target):
                with suppress(OSError):
                    recover_export(target)
        left = [path for path in folder.iterdir() if path.is_dir() and not in_use(path)]
    except OSError:  # the folder is missing or unreadable
        return []
    traces = []
    for path in sorted(left, key=lambda one: one.name):
        if not path.name.startswith(PREFIX):
            continue
        if any(path.iterdir()):
            traces.append(path)
        else:
            discard(path)
    return traces


def read_saved(folder: Path) -> ModelRuns | None:
    """Facts of a saved trace without its rows; None if the user deleted all its runs.

    Raises TraceFileError.
    """
    session = read_session(folder / SESSION_FILE)
    store = TraceStore()
    store.runs.update(session.runs)
    store.more_facts = session.more
    store.let_go_of_rows(folder)
    if store.runs and all(notes_of(facts).deleted for facts in list(store.runs.values())):
        return None
    cut = tuple(RunRef(store, i) for i, facts in list(store.runs.items()) if facts.stops is None)
    for run in cut:
        run.facts.stops = [INTERRUPTED]
    return ModelRuns(source_of(store), store, False, True, cut)


def source_of(store: TraceStore) -> str:
    """The heading for the runs of a saved trace: for old ones, the model."""
    more = store.more_facts
    if isinstance(name := more.get(SOURCE), str) and name:
        return name
    model = store.runs[0].model if store.runs else None
    name = (model or {}).get("name")
    return str(name or "earlier session").removesuffix(".gguf")
