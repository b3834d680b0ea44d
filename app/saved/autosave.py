"""The session's traces, written every half minute so that a crash loses little.

A window writes each of them into a folder of its own, held by a lock file that names its process.
A clean end takes them away, or leaves those that the user wants to keep; a folder whose lock
nobody holds is what a crash or such an end left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject, QTimer, Signal

from app.engine_thread.events import CommandFailed, TraceExported, TraceMark, failure, mark_of
from app.engine_thread.trace_jobs import TraceJob, start_export
from app.saved.errors import log
from app.saved.folders import hold, is_held, lock_path, unwritable
from engine.errors import DraftscopeError
from engine.trace.export import SESSION_FILE, export_csv, recover_export
from engine.trace.replacing import target_of
from engine.trace.store import TraceStore

PERIOD_MS = 30_000
DAYS_KEPT = 14
LEFTOVERS_KEPT = 20
"""Older ones, and more of them, are removed at the next start."""

_PREFIX = "session-"
_JOIN_TIMEOUT = 5.0
_MOST_SESSION_BYTES = 64 << 20


@dataclass
class _SavedTrace:
    """The autosave of one trace. saved, exported: how much of it the folder and exports hold."""

    folder: Path
    lock: QLockFile | None = None
    saved: TraceMark | None = None
    exported: TraceMark | None = None


class Autosave(QObject):
    """Saves those of `stores` that have grown. `folder`: the parent of all autosaves."""

    saved = Signal()
    failed = Signal(object)  # events.CommandFailed; told once, until something could be saved again
    _posted = Signal(object)

    def __init__(
        self, folder: Path, stores: Callable[[], Sequence[TraceStore]], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._parent_folder = folder
        self._name = time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S") + f"-{os.getpid()}-{id(self):x}"
        self._stores = stores
        self._copies: dict[TraceStore, _SavedTrace] = {}
        self._waiting: list[TraceStore] = []
        self._job: TraceJob | None = None
        self.problem: CommandFailed | None = None
        """Why nothing could be saved the last time."""
        self._timer = QTimer(self)
        self._timer.setInterval(PERIOD_MS)
        self._timer.timeout.connect(self.save)
        self._posted.connect(self._receive)

    def start(self) -> None:
        """Save every half minute from now on."""
        self._timer.start()

    def folder_of(self, store: TraceStore) -> Path:
        """Where a trace is saved."""
        return self._copy(store).folder

    def unexported(self) -> list[TraceStore]:
        """The traces that hold what is in no export."""
        return [
            store
            for store in self._stores()
            if store.size() and mark_of(store) != self._copy(store).exported
        ]

    def unsaved(self) -> list[TraceStore]:
        """The traces of `unexported` whose newest rows are in no autosave either."""
        return [s for s in self.unexported() if mark_of(s) != self._copy(s).saved]

    def note_export(self, event: TraceExported) -> None:
        """Remember that rows up to event.mark are exported to a folder of the user's choice."""
        self._copy(event.store).exported = event.mark

    def save(self) -> None:
        """Write what is unsaved now, on a thread, unless that is being done."""
        if self._job is None:
            self._waiting = self.unsaved()
            self._save_next()

    def keep(self) -> CommandFailed | None:
        """Write what is unsaved and wait for it; what went wrong, if anything did."""
        self._join()
        for store in self.unsaved():
            try:
                self._make_room(store)
                mark = mark_of(store)
                export_csv(store, self.folder_of(store))
            except Exception as error:
                self.problem = failure(error)
                return self.problem
            self._copy(store).saved = mark
        return None

    def close(self, *, keep: bool = False) -> None:
        """A clean end. keep: what is in no export is left for the next start to offer, as far as
        it was saved; else nothing is left."""
        self._timer.stop()
        self._join()
        kept = self.unexported() if keep else []
        for store, copy in self._copies.items():
            if copy.lock is not None:
                if store not in kept:
                    shutil.rmtree(copy.folder, ignore_errors=True)
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

    def _save_next(self) -> None:
        if self._waiting:
            store = self._waiting.pop(0)
            try:
                self._make_room(store)
            except DraftscopeError as error:
                self._tell(failure(error))
            else:
                folder = self.folder_of(store)
                self._job = start_export(store, folder, False, self._posted.emit)

    def _join(self) -> None:
        self._waiting = []
        if self._job is not None:
            self._job.cancel()
            self._job.join(_JOIN_TIMEOUT)
            self._job = None

    def _receive(self, event: object) -> None:
        if isinstance(event, CommandFailed):
            self._waiting = []
            self._tell(event)
        elif isinstance(event, TraceExported):
            self._job = None
            if event.folder is not None:
                self._copy(event.store).saved = event.mark
                self.problem = None
                self.saved.emit()
            self._save_next()

    def _tell(self, problem: CommandFailed) -> None:
        log.warning("autosave: %s %s", problem.message, problem.remedy)
        if self.problem is None:
            self.failed.emit(problem)
        self.problem = problem


def leftovers(folder: Path) -> list[Path]:
    """Autosaves of windows that ended without taking them away, the newest first.

    What is too old or one too many is deleted, and so are half-written ones. One that was being
    replaced when its process was killed is brought back first.
    """
    try:
        for target in {found for path in folder.iterdir() if (found := target_of(path))}:
            if not _in_use(target):
                with suppress(OSError):
                    recover_export(target)
        left = [path for path in folder.iterdir() if path.is_dir() and not _in_use(path)]
    except OSError:  # there is no such folder, or it is not ours to read
        return []
    complete = sorted(
        (path for path in left if path.name.startswith(_PREFIX) and _is_whole(path)),
        key=_time,
        reverse=True,
    )
    oldest = time.time() - DAYS_KEPT * 86_400
    kept = [path for path in complete if _time(path) >= oldest][:LEFTOVERS_KEPT]
    for path in set(left) - set(kept):
        if target_of(path) is None:
            discard(path)
    return kept


def model_in(folder: Path) -> str:
    """Name of the model whose runs an autosave holds, empty where that cannot be told."""
    path = folder / SESSION_FILE
    try:
        if path.stat().st_size > _MOST_SESSION_BYTES:
            return ""
        return str(json.loads(path.read_bytes())["runs"]["0"]["model"]["name"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def discard(folder: Path) -> None:
    """Delete an autosave that nobody holds."""
    shutil.rmtree(folder, ignore_errors=True)
    lock_path(folder).unlink(missing_ok=True)


def adopt(folder: Path, restored: Path) -> Path:
    """Move an autosave to where no clean-up reaches it; returns its new place."""
    restored.mkdir(parents=True, exist_ok=True)
    kept = restored / folder.name
    folder.rename(kept)
    lock_path(folder).unlink(missing_ok=True)
    return kept


def _in_use(folder: Path) -> bool:
    """Whether a live process writes here; a stage of an export belongs to its session's lock."""
    return is_held(target_of(folder) or folder)


def _is_whole(folder: Path) -> bool:
    return (folder / SESSION_FILE).is_file()


def _time(folder: Path) -> float:
    return (folder / SESSION_FILE).stat().st_mtime
