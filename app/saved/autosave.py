"""The session's trace, written every half minute so that a crash loses little.

A window writes into a folder of its own, held by a lock file that names its process. A clean end
takes both away; a folder whose lock nobody holds is what a crash left.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from PySide6.QtCore import QLockFile, QObject, QTimer, Signal

from app.engine_thread.events import Exported, Failed
from app.engine_thread.trace_jobs import TraceJob, start_export
from app.saved.errors import log
from app.saved.process_lock import hold, is_held, lock_path
from engine.trace.export import SESSION_FILE, recover_export
from engine.trace.replacing import target_of
from engine.trace.store import TraceStore

PERIOD_MS = 30_000
DAYS_KEPT = 14
LEFTOVERS_KEPT = 3
"""Older ones, and more of them, are removed at the next start."""

_PREFIX = "session-"
_JOIN_TIMEOUT = 5.0


class Autosave(QObject):
    """Saves what `store` returns whenever it has grown. `folder`: the parent of all autosaves."""

    saved = Signal()
    _posted = Signal(object)

    def __init__(self, folder: Path, store: Callable[[], TraceStore], parent: QObject) -> None:
        super().__init__(parent)
        name = time.strftime(f"{_PREFIX}%Y%m%d-%H%M%S") + f"-{os.getpid()}-{id(self):x}"
        self.folder = folder / name
        self._store = store
        self._lock: QLockFile | None = None
        self._job: TraceJob | None = None
        self._saved: tuple[TraceStore, int] | None = None
        self._saving: tuple[TraceStore, int] | None = None
        self._timer = QTimer(self)
        self._timer.setInterval(PERIOD_MS)
        self._timer.timeout.connect(self.save)
        self._posted.connect(self._receive)

    def start(self) -> None:
        """Save every half minute from now on."""
        self._timer.start()

    @property
    def dirty(self) -> bool:
        """Whether the trace holds rows that are in no autosave."""
        store = self._store()
        size = store.size()
        return size > 0 and self._saved != (store, size)

    def save(self) -> None:
        """Write the trace now, on a thread, unless there is nothing new or it is being written."""
        if self._job is not None or not self.dirty:
            return
        if self._lock is None:
            self._lock = _make_room(self.folder)
            if self._lock is None:
                return
        store = self._store()
        self._saving = (store, store.size())
        self._job = start_export(store, self.folder, False, self._posted.emit)

    def close(self) -> None:
        """A clean end: nothing is left to restore."""
        self._timer.stop()
        if self._job is not None:
            self._job.cancel()
            self._job.join(_JOIN_TIMEOUT)
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.unlock()

    def _receive(self, event: object) -> None:
        if isinstance(event, Failed):
            log.warning("autosave: %s %s", event.message, event.remedy)
        elif isinstance(event, Exported):
            self._job = None
            if event.folder is not None:
                self._saved = self._saving
                self.saved.emit()


def leftovers(folder: Path) -> list[Path]:
    """Autosaves of windows that ended without taking them away, the newest first.

    What is too old or one too many is deleted, and so are half-written ones. One that was being
    replaced when its process was killed is brought back first.
    """
    if not folder.is_dir():
        return []
    for target in {found for path in folder.iterdir() if (found := target_of(path))}:
        if not _in_use(target):
            with suppress(OSError):
                recover_export(target)
    left = [path for path in folder.iterdir() if path.is_dir() and not _in_use(path)]
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


def _make_room(folder: Path) -> QLockFile | None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("autosave: %s", error)
        return None
    return hold(folder)


def _in_use(folder: Path) -> bool:
    """Whether a live process writes here; a stage of an export belongs to its session's lock."""
    return is_held(target_of(folder) or folder)


def _is_whole(folder: Path) -> bool:
    return (folder / SESSION_FILE).is_file()


def _time(folder: Path) -> float:
    return (folder / SESSION_FILE).stat().st_mtime
