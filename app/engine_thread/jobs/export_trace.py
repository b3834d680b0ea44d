"""Exporting a trace: its tables are written as CSV files into a folder."""

from __future__ import annotations

from pathlib import Path

from app.engine_thread.events import mark_of
from app.engine_thread.job import SideJob
from app.engine_thread.status import EngineStatus
from engine.progress import ReportProgress
from engine.trace.export import SavedRows, append_csv, export_csv
from engine.trace.store import TraceStore


class ExportTrace(SideJob):
    """Export a trace. mark: how far it had grown when the export began, which at least is in the
    folder. is_complete: everything is written."""

    has_progress = True
    is_complete = False

    def __init__(self, store: TraceStore, folder: Path, *, excel_safe: bool = False) -> None:
        super().__init__()
        self.store, self.folder, self._excel_safe = store, folder, excel_safe
        self.mark = mark_of(store)

    def may_start(self, status: EngineStatus) -> bool:
        return not status.exporting

    def on_ask(self, status: EngineStatus) -> None:
        status.exporting = True

    def run(self, progress: ReportProgress) -> None:
        export_csv(
            self.store,
            self.folder,
            progress=progress,
            cancelled=self.cancelled.is_set,
            excel_safe=self._excel_safe,
        )
        self.is_complete = True

    def on_finish(self, status: EngineStatus) -> None:
        status.exporting = False
        if self.is_complete:
            status.exported.emit(self)


class SaveTrace(ExportTrace):
    """Put what is new of a trace into the folder that holds `saved` of it, None = nothing."""

    def __init__(self, store: TraceStore, folder: Path, saved: SavedRows | None) -> None:
        super().__init__(store, folder)
        self.saved = saved

    def run(self, progress: ReportProgress) -> None:
        self.saved = append_csv(
            self.store, self.folder, self.saved, progress=progress, cancelled=self.cancelled.is_set
        )
        self.is_complete = True
