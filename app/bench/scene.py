"""The real window for a measurement: its own settings and data, off the screen without one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PySide6.QtCore import QEventLoop, QSettings, QTimer
from PySide6.QtWidgets import QApplication

from app.cli.display import check_display
from app.dialogs.unexported import Fate
from app.engine_thread.bridge import Bridge
from app.engine_thread.jobs import Engine
from app.saved.settings import Settings
from app.shell.collector import Collector
from app.shell.window import MainWindow
from engine.errors import DraftscopeError

PATIENCE = 120.0
"""The longest wait for anything, seconds."""
_CHECK_MS = 20


def use_some_display() -> str:
    """Take the display that is there, else Qt's offscreen platform; says which."""
    try:
        check_display()
    except DraftscopeError:
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
    chosen = os.environ.get("QT_QPA_PLATFORM")
    return chosen or "a display"


@contextmanager
def shown_window(
    width: int = 1280, height: int = 800, engine: Engine | None = None
) -> Iterator[MainWindow]:
    """A window as `draftscope` opens it, which forgets everything when it is closed."""
    use_some_display()
    app = QApplication.instance() or QApplication(["draftscope"])
    collector = Collector()
    with tempfile.TemporaryDirectory() as folder:
        QSettings.setPath(QSettings.Format.IniFormat, QSettings.Scope.UserScope, folder)
        collector.start()
        bridge = Bridge(engine)
        window = MainWindow(bridge, Settings(), data=Path(folder) / "data")
        window.sessions.fate = Fate.DISCARD
        try:
            window.resize(width, height)
            window.show()
            spin(window.isVisible)
            settle(0.2)
            yield window
        finally:
            window.close()
            collector.stop()
            window.deleteLater()
            settle(0.05)
            assert app is not None


def spin(done: Callable[[], bool], patience: float = PATIENCE, check_ms: int = _CHECK_MS) -> None:
    """Let the window work until something is so; every look takes Python from the engine. Raises
    TimeoutError."""
    if done():
        return
    loop, check, late = QEventLoop(), QTimer(), QTimer()

    def look() -> None:
        if done():
            loop.quit()

    check.timeout.connect(look)
    late.setSingleShot(True)
    late.timeout.connect(lambda: loop.exit(1))
    check.start(check_ms)
    late.start(round(1e3 * patience))
    if loop.exec():
        raise TimeoutError("The window did not come to the state waited for.")


def settle(seconds: float) -> None:
    """Let the window work for some time."""
    end = time.monotonic() + seconds
    spin(lambda: time.monotonic() >= end)
