"""Results of sweeps and of `draftscope tune` in the window: asked for, shown, and their traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QWidget

from app.engine_thread.bridge import Bridge
from app.engine_thread.jobs.read_results import ReadResults
from app.saved.settings import Settings
from app.window.dialogs.files import ask_results
from app.window.docks import Docks
from app.window.panels import Panels
from app.window.sessions import Sessions

if TYPE_CHECKING:
    from app.panels.results.results_view import ResultsView


class OpenedResults:
    """Belongs to one window, whose panels are complete before anything is opened."""

    def __init__(
        self,
        bridge: Bridge,
        panels: Panels,
        docks: Docks,
        sessions: Sessions,
        settings: Settings,
        window: QWidget,
    ) -> None:
        self._bridge, self._panels, self._docks = bridge, panels, docks
        self._sessions, self._settings, self._window = sessions, settings, window

    def connect(self, view: ResultsView) -> None:
        """Listen to the panel."""
        view.trace_asked.connect(self._open_trace)
        view.again_asked.connect(lambda results: self.open(results.path))

    def ask(self) -> None:
        """Let the user choose a file."""
        path = ask_results(self._window, self._settings)
        if path is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        """Read a result file, or the one in a folder, and show it."""
        self._panels.banners.clear()
        self._bridge.ask(ReadResults(path), self._show)

    def _show(self, job: ReadResults) -> None:
        if job.found is not None:
            self._panels.results.show_results(job.found)
            self._docks.reveal("results")

    def _open_trace(self, row: int) -> None:
        results = self._panels.results.results
        if results is None:
            return
        folder, name = results.trace(row), results.columns[0].text(row)
        if folder is not None:
            self._sessions.open(folder)
        elif error := results.error(row):
            self._panels.banners.add("info", f"Job {name} left no trace: {error}")
        else:
            where = results.path.parent
            self._panels.banners.add("info", f"The trace of job {name} is not in {where}.")
