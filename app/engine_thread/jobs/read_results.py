"""Reading the results of a sweep or of `draftscope tune`."""

from __future__ import annotations

from pathlib import Path

from app.engine_thread.job import SideJob
from app.engine_thread.status import EngineStatus
from app.trace_models.results import Results, read
from engine.progress import ReportProgress


class ReadResults(SideJob):
    """Read a result file, or the one in a folder."""

    found: Results | None = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def may_start(self, status: EngineStatus) -> bool:
        return not status.reading_results

    def on_ask(self, status: EngineStatus) -> None:
        status.reading_results = True

    def run(self, progress: ReportProgress) -> None:
        self.found = read(self._path)

    def on_finish(self, status: EngineStatus) -> None:
        status.reading_results = False
