"""Traces in and out of the window: export, opening, autosave, what is left at the end of one
window and offered at the start of the next."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QWidget

from app.dialogs.files import ExportDialog, ask_report, ask_trace
from app.dialogs.help import environment
from app.dialogs.unexported import QuitChoice, ask_before_quitting, may_drop
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import CommandFailed
from app.models.compared_lanes import lanes_of
from app.models.run_facts import ModelRuns
from app.saved.autosave import Autosave, adopt, discard, leftovers, model_in
from app.saved.folders import unwritable
from app.saved.settings import Settings
from app.widgets.banner import Banner, BannerArea
from engine.trace.export import SESSION_FILE
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

_AUTOSAVES, _RESTORED = "autosave", "restored"
_OFFERED = 2
"""Traces at once; the next start offers others."""


class Sessions(QObject):
    """Belongs to one window. `data`: the user's data folder; without one nothing is autosaved, and
    nothing is asked at the end.

    quit_choice: what becomes of unexported runs at the end; None asks the user.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: Settings,
        banners: BannerArea,
        data: Path | None,
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._bridge, self._settings, self._banners = bridge, settings, banners
        self._data, self._window = data, window
        self.quit_choice: QuitChoice | None = None
        self._keeps = False
        self.autosave: Autosave | None = None
        if data is not None:
            self.autosave = Autosave(
                data / _AUTOSAVES, lambda: [runs.store for runs in bridge.recorded], self
            )
            self.autosave.failed.connect(self._tell_unsaved)
            bridge.exported.connect(self.autosave.note_export)
            self.autosave.start()
        bridge.trace_shown.connect(self._remember)

    def open(self, folder: Path) -> None:
        """Read an exported trace and show it; no model is needed."""
        self._banners.clear()
        self._bridge.open_trace(folder)

    def ask(self) -> None:
        """Let the user choose a trace."""
        folder = ask_trace(self._window, self._settings)
        if folder is not None:
            self.open(folder)

    def export(self, store: TraceStore) -> None:
        """Ask where to, without blocking the window, then write."""
        dialog = ExportDialog(store, self._settings, self._window)
        dialog.chosen.connect(
            lambda folder, excel: self._bridge.export(store, folder, excel_safe=excel)
        )
        dialog.show()

    def report(self, run: RunRef) -> None:
        """Ask for a file and write the report on a run, or on the comparison it is a lane of."""
        path = ask_report(self._window, self._settings)
        if path is not None:
            self._bridge.report(lanes_of(run) or (run,), path, environment())

    def drop(self, runs: ModelRuns) -> None:
        """Forget the runs of a model, and ask before if they were not exported."""
        unexported = self.autosave is not None and runs.store in self.autosave.unexported()
        if not unexported or may_drop(self._window, runs):
            self._bridge.drop(runs.store)

    def offer_restore(self) -> None:
        """A banner for each of the newest traces that earlier windows left behind; and one if this
        window can leave nothing behind."""
        if self._data is None:
            return
        problem = unwritable(self._data)
        if problem:
            self._banners.add(
                "warning",
                problem,
                "Runs and the log are not saved: export what is to stay (Ctrl+E).",
                sticky=True,
            )
        for folder in reversed(leftovers(self._data / _AUTOSAVES)[:_OFFERED]):
            self._offer(folder)

    def may_end(self) -> bool:
        """Ask what becomes of runs that were not exported, and see to it; False: the window is to
        stay open. A run that goes on is ended if it is to be kept."""
        autosave = self.autosave
        unexported = [] if autosave is None else autosave.unexported()
        if autosave is None or not unexported:
            return True
        quit_choice = self.quit_choice
        if quit_choice is None:
            problem = "" if autosave.problem is None else autosave.problem.message
            recorded = [runs for runs in self._bridge.recorded if runs.store in unexported]
            quit_choice = ask_before_quitting(self._window, recorded, problem)
        self._keeps = quit_choice is QuitChoice.KEEP
        return self._keep(autosave) if self._keeps else quit_choice is QuitChoice.DISCARD

    def close(self) -> None:
        """A clean end."""
        if self.autosave is not None:
            self.autosave.close(keep=self._keeps)

    def _keep(self, autosave: Autosave) -> bool:
        QGuiApplication.setOverrideCursor(Qt.CursorShape.WaitCursor)
        try:
            if self._bridge.has_run:
                self._bridge.end_run()
            failed = autosave.keep()
        finally:
            QGuiApplication.restoreOverrideCursor()
        if failed is not None:
            self._tell_unsaved(failed)
        return failed is None

    def _tell_unsaved(self, failed: CommandFailed) -> None:
        self._banners.add("error", f"The runs are not saved. {failed.message}", failed.remedy)

    def _offer(self, folder: Path) -> None:
        saved = time.localtime((folder / SESSION_FILE).stat().st_mtime)
        when, model = time.strftime("%Y-%m-%d %H:%M", saved), model_in(folder)
        banner: Banner = self._banners.add(
            "warning",
            f"The last session left runs{f' of {model}' if model else ''} that were not exported.",
            f"They were saved {when}.",
            ("&Restore", lambda: self._restore(folder, banner)),
            ("&Discard", lambda: self._discard(folder, banner)),
            sticky=True,
        )

    def _restore(self, folder: Path, banner: Banner) -> None:
        if self._bridge.reading:
            return  # one after the other: the banner stays
        banner.dismissed.emit()
        assert self._data is not None
        try:
            kept = adopt(folder, self._data / _RESTORED)
        except OSError as error:
            self._banners.add("error", f"{folder} cannot be restored: {error.strerror}.")
            return
        self.open(kept)
        self._banners.add("info", f"The restored trace is kept in {kept}.")

    def _discard(self, folder: Path, banner: Banner) -> None:
        banner.dismissed.emit()
        discard(folder)

    def _remember(self, folder: Path | None) -> None:
        if folder is not None:
            self._settings.add_recent_trace(folder)
