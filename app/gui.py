"""Start of the window: application, error hooks, main window, first model."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject, Signal
from PySide6.QtWidgets import QApplication

from app.bridge import Bridge
from app.collector import Collector
from app.errors import ErrorCatcher
from app.folders import data_folder
from app.settings import Settings
from app.window import MainWindow
from engine.compare.scenario import scenarios
from engine.version import version
from resources import SCENARIOS


class _Relay(QObject):
    """Brings errors of any thread to the window's thread."""

    caught = Signal(str)


def run_window(
    models: list[Path], draft: Path | None, demo: bool, trace: Path | None = None
) -> int:
    """Show the window until it is closed, with the first of `models`, the demo, or the exported
    trace in the folder `trace` opened.

    Returns the exit status. torch is not imported before the window is visible.
    """
    app = QApplication.instance() or QApplication(sys.argv[:1])
    QCoreApplication.setOrganizationName("Draftscope")
    QCoreApplication.setApplicationName("draftscope")
    QCoreApplication.setApplicationVersion(version())
    relay = _Relay()
    data = data_folder()
    catcher = ErrorCatcher(data, relay.caught.emit)
    catcher.install()
    collector = Collector()
    collector.start()
    try:
        known = scenarios(SCENARIOS)
        window = MainWindow(Bridge(), Settings(), catcher.recent_lines, known, data=data)
        relay.caught.connect(window.show_unexpected)
        signal.signal(signal.SIGINT, lambda *_: window.close())
        window.show()
        if catcher.last_crash:
            window.show_crash(catcher.last_crash)
        if demo:
            window.open_demo()
        elif trace is not None:
            window.sessions.open(trace)
        elif models:
            window.open_model(models[0], draft)
        window.sessions.offer_restore()
        return app.exec()
    finally:
        collector.stop()
        catcher.uninstall()
