"""Reading a trace that was exported, or a file of another engine."""

from __future__ import annotations

from pathlib import Path

from app.engine_thread.events import TraceRead
from app.engine_thread.job import SideJob
from app.engine_thread.status import EngineStatus
from engine.progress import ReportProgress
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore


class ReadTrace(SideJob):
    """Read a trace and show it, or offer to if something else has come on show since. It is listed
    until it is closed."""

    has_progress = True
    read: TraceStore | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._n_shown = 0

    def may_start(self, status: EngineStatus) -> bool:
        return not status.reading

    def on_ask(self, status: EngineStatus) -> None:
        status.reading = True
        self._n_shown = status.n_shown

    def run(self, progress: ReportProgress) -> None:
        progress(0, 1, "reading the trace")
        if self._folder.is_file():
            self.read = _imported(self._folder)
        else:
            self.read = open_trace(self._folder, progress=progress, cancelled=self.cancelled.is_set)

    def on_finish(self, status: EngineStatus) -> None:
        status.reading = False
        if self.read is not None and not self.cancelled.is_set():
            self.take(status, self.read)

    def take(self, status: EngineStatus, read: TraceStore) -> None:
        """Take over what was read."""
        trace = TraceRead(self._folder, read)
        if status.n_shown == self._n_shown:
            status.show_trace(trace)
        else:
            status.trace_read.emit(trace)


class ReadRows(ReadTrace):
    """Bring the rows of a trace back into memory that are in a folder alone."""

    def __init__(self, store: TraceStore, folder: Path) -> None:
        super().__init__(folder)
        self._store = store

    def take(self, status: EngineStatus, read: TraceStore) -> None:
        status.take_rows(self._store, read)


def _imported(file: Path) -> TraceStore:
    """What another engine wrote as a trace, with what the rules find in it."""
    from engine.analysis.findings.check import record_findings
    from engine.observe.files.importing import import_file

    store = TraceStore()
    record_findings(store, import_file(store, file))
    return store
