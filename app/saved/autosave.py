"""Traces of the session, written every half minute so that a crash loses little, and those of
earlier sessions.

A window writes each of them into a folder of its own, held by a lock file that names its process.
A clean end leaves them for the next start, but for those that the user discards; a folder whose
lock is not held is one of an earlier session. What a list says of its runs is in session.json; the
rows are read when one of them is to be shown.
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
"""Names of the folders begin with it, and go on with the time: in order of age."""
_JOIN_TIMEOUT = 5.0


@dataclass
class _SavedTrace:
    """The autosave of one trace. saved, exported: how much of it the folder and exports hold. rows:
    those in the folder, which new ones can follow.
    is_earlier: the trace is one of an earlier session, about which the user is not asked."""

    folder: Path
    lock: QLockFile | None = None
    saved: TraceMark | None = None
    rows: SavedRows | None = None
    exported: TraceMark | None = None
    is_earlier: bool = False


class Autosave(QObject):
    """Saves those of `stores` that have grown. `folder`: the parent of all autosaves. `is_busy`:
    whether a run goes on."""

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
        """Why nothing could be saved the last time."""
        self._timer = timer(self, self.save, PERIOD_MS)
        self._soon = timer(self, self._save_at_rest, SOON_MS, once=True)
        self._early = timer(self, self.save, EARLY_MS, once=True)
        self._posted.connect(self._receive)

    def start(self) -> None:
        """Save every half minute from now on."""
        self._timer.start()

    def save_soon(self) -> None:
        """Save in a moment: a run has ended, which a crash would take."""
        self._soon.start()

    def save_early(self) -> None:
        """A run has started: save it before the half minute is over, if it still goes on by then;
        `save_soon` is for one that has ended."""
        self._early.start()

    def folder_of(self, store: TraceStore) -> Path:
        """Where a trace is saved."""
        return self._copy(store).folder

    def take(self, store: TraceStore) -> None:
        """Know a trace of an earlier session, whose rows are on disk."""
        assert store.rows_in is not None
        self._copies[store] = _SavedTrace(store.rows_in, saved=mark_of(store), is_earlier=True)

    def note_reading(self, store: TraceStore) -> None:
        """Remember that a trace has been read from its folder, and holds what is there."""
        self._copy(store).saved = mark_of(store)

    def unexported(self) -> list[TraceStore]:
        """The traces of this session that hold what is in no export."""
        return [
            store
            for store in self._stores()
            if not self._copy(store).is_earlier and self._mark(store) != self._copy(store).exported
        ]

    def unsaved(self) -> list[TraceStore]:
        """The traces whose newest rows are in no folder of this program's."""
        return [store for store in self._stores() if not self.is_saved(store)]

    def is_saved(self, store: TraceStore) -> bool:
        """Whether all of a trace is in its folder."""
        return self._copy(store).saved == self._mark(store)

    @property
    def is_writing(self) -> bool:
        """Whether a trace is being read in order to write it."""
        return self._job is not None

    def note_facts(self, run: RunRef, fact: str) -> None:
        """Write a fact of a run that has changed, at once where the run is in a folder. Raises
        TraceFileError."""
        copy = self._copy(run.store)
        if copy.saved is not None and not self.is_writing:
            change_facts(copy.folder, {run.run_id: run.facts.pick(fact)})
        elif run.store.rows_in is None:
            copy.saved = None

    def _mark(self, store: TraceStore) -> TraceMark | None:
        """How much a trace holds; of one whose rows are not in memory, how much was saved."""
        is_known = store.rows_in is None and store.size()
        return mark_of(store) if is_known else self._copy(store).saved

    def note_export(self, export: ExportTrace) -> None:
        """Remember that rows up to its mark are exported to a folder of the user's choice."""
        if not export.runs:  # else the others are nowhere
            self._copy(export.store).exported = export.mark

    def save(self) -> None:
        """Write what is unsaved now, on a thread, unless that is being done."""
        if self._job is None:
            self._waiting = self.unsaved()
            self._save_next()

    def keep(self, but: Collection[TraceStore] = ()) -> DraftscopeError | None:
        """Write what is unsaved, of all traces but some, and wait for it; what went wrong, if
        anything did."""
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
        """A clean end: what was saved is left for the next start, but for traces discarded."""
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
        """Hold the folder of a trace. Raises DraftscopeError where it takes no files."""
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
        if not self._is_busy():  # writing would cost the next run time, so that waits its turn
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
    """Whether a living window writes here; a stage of an export belongs to its session's lock."""
    return is_held(target_of(folder) or folder)


INTERRUPTED = "interrupted"
"""Why a run ended whose window ended before it."""


DamagedTrace = tuple[Path, DraftscopeError]
"""A folder of the library that does not open, and why."""


class ReadLibrary(SideJob):
    """Read what earlier sessions left, the oldest first; posts each of them."""

    def __init__(self, folder: Path, post: Callable[[ModelRuns | DamagedTrace], None]) -> None:
        super().__init__()
        self._folder, self._post = folder, post

    def run(self, progress: ReportProgress) -> None:
        for path in saved_folders(self._folder):
            if self.cancelled.is_set():
                break
            try:
                found = read_saved(path)
            except BaseException as error:  # one that is damaged does not hide the others
                self._post((path, failure(error)))
                continue
            if found is None:
                discard(path)
            else:
                self._post(found)


def saved_folders(folder: Path) -> list[Path]:
    """Traces that no living window writes, the oldest first.

    One that was being replaced when its process was killed is brought back first; what is left of
    half-written ones is deleted.
    """
    try:
        for target in {found for path in folder.iterdir() if (found := target_of(path))}:
            if not in_use(target):
                with suppress(OSError):
                    recover_export(target)
        left = [path for path in folder.iterdir() if path.is_dir() and not in_use(path)]
    except OSError:  # there is no such folder, or it is not ours to read
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
    """What is known of a saved trace without its rows; None where the user deleted all its runs.

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
    """The name that the runs of a saved trace are listed under: of old ones, that of the model."""
    more = store.more_facts
    if isinstance(name := more.get(SOURCE), str) and name:
        return name
    model = store.runs[0].model if store.runs else None
    name = (model or {}).get("name")
    return str(name or "earlier session").removesuffix(".gguf")
