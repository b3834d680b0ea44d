"""Traces in and out of the window: export, opening, autosave, and what a crash left behind."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.dialogs.export import ExportDialog
from app.dialogs.open_files import ask_trace
from app.engine_thread.bridge import Bridge
from app.saved.autosave import Autosave, adopt, discard, leftovers
from app.saved.settings import Settings
from app.widgets.banner import Banner, BannerArea
from engine.trace.export import SESSION_FILE
from engine.trace.store import TraceStore

_AUTOSAVES, _RESTORED = "autosave", "restored"


class Sessions(QObject):
    """Belongs to one window. `data`: the user's data folder; without one nothing is autosaved."""

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
        self.autosave: Autosave | None = None
        if data is not None:
            self.autosave = Autosave(data / _AUTOSAVES, lambda: bridge.session_store, self)
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

    def offer_restore(self) -> None:
        """A banner for the newest trace that an earlier window left behind, if there is one."""
        if self._data is None:
            return
        for folder in leftovers(self._data / _AUTOSAVES)[:1]:
            self._offer(folder)

    def close(self) -> None:
        """A clean end."""
        if self.autosave is not None:
            self.autosave.close()

    def _offer(self, folder: Path) -> None:
        saved = time.localtime((folder / SESSION_FILE).stat().st_mtime)
        when = time.strftime("%Y-%m-%d %H:%M", saved)
        banner: Banner = self._banners.add(
            "warning",
            "The last session ended without being closed.",
            f"Its trace was saved {when}.",
            ("&Restore", lambda: self._restore(folder, banner)),
            ("&Discard", lambda: self._discard(folder, banner)),
            sticky=True,
        )

    def _restore(self, folder: Path, banner: Banner) -> None:
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
