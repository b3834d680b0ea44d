"""The real window for a measurement or a picture, and an engine whose runs stop midway for one."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PySide6.QtCore import QEventLoop, QSettings, QTimer
from PySide6.QtWidgets import QApplication

from app.cli.launch import check_display
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import Decoding, OpenRequest, RunRequest
from app.engine_thread.opening import LocalEngine, LocalSession
from app.saved.settings import Settings
from app.window.dialogs.files import QuitChoice
from app.window.gui import Collector
from app.window.window import MainWindow
from engine.errors import DraftscopeError
from engine.long_work import ReportProgress
from engine.trace.store import TraceStore

_LONGEST_WAIT = 120.0
"""The longest wait for anything, seconds."""
_CHECK_MS = 20


def use_some_display() -> str:
    """Choose Qt's offscreen platform where no display can be used; returns what is used."""
    try:
        check_display()
    except DraftscopeError:
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
    chosen = os.environ.get("QT_QPA_PLATFORM")
    return chosen or "a display"


@contextmanager
def shown_window(
    width: int = 1280, height: int = 800, engine: LocalEngine | None = None
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
        window.sessions.quit_choice = QuitChoice.DISCARD
        try:
            window.resize(width, height)
            window.show()
            wait_until(window.isVisible)
            settle(0.2)
            yield window
        finally:
            window.close()
            collector.stop()
            window.deleteLater()
            settle(0.05)
            assert app is not None


def wait_until(
    done: Callable[[], bool], patience: float = _LONGEST_WAIT, check_ms: int = _CHECK_MS
) -> None:
    """Run the event loop until `done` is true. Raises TimeoutError after `patience` seconds.

    check_ms: time between two calls of `done`, each of which takes Python's lock from the engine.
    """
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
    """Run the event loop for this many seconds."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end)


class HeldEngine(LocalEngine):
    """The local engine, whose runs pause after `n_rounds` rounds until `go_on`; None: never."""

    def __init__(self, n_rounds: int | None) -> None:
        self._n_rounds = n_rounds
        self._free = threading.Event()

    def go_on(self) -> None:
        """Let runs that are paused continue, and later ones not pause."""
        self._free.set()

    def open(self, request: OpenRequest, progress: ReportProgress) -> LocalSession:
        """See LocalEngine.open; the session's runs pause."""
        session = super().open(request, progress)
        start = session.start

        def start_held(request: RunRequest, trace: TraceStore) -> Decoding:
            return _HeldRun(start(request, trace), self._n_rounds, self._free)

        setattr(session, "start", start_held)  # noqa: B010
        return session


class _HeldRun:
    """A run that pauses after `n_rounds` rounds until `free` is set."""

    def __init__(self, run: Decoding, n_rounds: int | None, free: threading.Event) -> None:
        self._run, self._left, self._free = run, n_rounds, free
        self.run_id, self.cancel, self.stop = run.run_id, run.cancel, run.stop

    def step(self) -> bool:
        """One round of the run, where due after the pause."""
        if self._left == 0:
            self._free.wait()
        elif self._left is not None:
            self._left -= 1
        return self._run.step()

    advance = step  # a wait between two rounds of `advance` would hide the first
