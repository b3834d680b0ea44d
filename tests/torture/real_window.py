"""The real window in this process, without a screen: how long it blocks, and what it lets slip."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QSettings, QTimer
from PySide6.QtWidgets import QApplication, QDockWidget

from app.engine_thread.bridge import Bridge
from app.engine_thread.jobs.files import ReadTrace
from app.engine_thread.worker import Job
from app.saved.settings import Settings
from app.window.dialogs.files import QuitChoice
from tests.torture import awake, heart

if TYPE_CHECKING:
    from app.window.window import MainWindow
    from tests.support.fake_session import FakeEngine

BLOCKED_S = 2.0
"""Of its own processor time, as long as a window may not answer."""


class RealWindow:
    """A main window over the engine, or over a made-up one. Only one may be made in a process.

    errors: exceptions that no one caught. blocked_s: the longest time without an answer. n_loaded,
    n_read: models that were loaded and traces that were read, or refused.
    """

    def __init__(self, folder: Path, engine: FakeEngine | None = None) -> None:
        from app.window.window import MainWindow

        os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.fail.Keyring"
        ini, user = QSettings.Format.IniFormat, QSettings.Scope.UserScope
        QSettings.setPath(ini, user, str(folder / "settings"))
        self.errors: list[str] = []
        self.blocked_s = 0.0
        self.n_loaded = self.n_read = 0
        sys.excepthook = self._catch
        threading.excepthook = lambda args: self._catch(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )
        self.app = QApplication.instance() or QApplication(sys.argv[:1])
        self.window: MainWindow = MainWindow(Bridge(engine) if engine else Bridge(), Settings())
        self.window.sessions.quit_choice = QuitChoice.DISCARD
        self.window.bridge.loaded.connect(self._count_loaded)
        self.window.bridge.finished.connect(self._count_read)
        self.window.resize(1280, 800)
        self.window.show()
        self._beats = QTimer(self.window)
        self._beats.timeout.connect(heart.beat)
        self._beats.start(heart.BEAT_MS)
        self.events()

    def events(self) -> None:
        """What waits for the window's thread, timed. Without a loop of its own Qt would delete
        nothing that is to be deleted later."""
        start = time.thread_time()
        self.app.processEvents()
        self.app.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        self.blocked_s = max(self.blocked_s, time.thread_time() - start)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        """Raises AssertionError if it does not hold in time."""
        end = awake.now() + seconds
        with heart.beating():
            while not holds():
                assert awake.now() < end, f"not within {seconds:.0f} s: {what}"
                self.events()
                time.sleep(0.002)

    def look_at_all(self) -> None:
        """Every view raised and painted, every plot in every unit."""
        for dock in self.window.findChildren(QDockWidget):
            dock.show()
            dock.raise_()
            self.events()
            start = time.thread_time()
            dock.widget().grab()
            self.blocked_s = max(self.blocked_s, time.thread_time() - start)
        for plot in (self.window.panels.plots.rollback, self.window.panels.plots["ring"]):
            plot.plot.show_all()
            for unit in ("token", "time", "round"):
                plot.plot.set_unit(unit)
                self.events()

    def check(self) -> None:
        """Raises AssertionError for an exception that no one caught, and for too long a block."""
        assert not self.errors, self.errors[0]
        assert self.blocked_s < BLOCKED_S, f"the window did not answer for {self.blocked_s:.1f} s"

    def close(self) -> None:
        """Close it and wait for its engine."""
        self.window.close()
        self.until(lambda: self.window.bridge.close(0), "the engine's end")

    def _count_loaded(self, _: object) -> None:
        self.n_loaded += 1

    def _count_read(self, job: Job) -> None:
        self.n_read += isinstance(job, ReadTrace)

    def _catch(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        frame = trace
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = frame.tb_frame.f_code if frame else None
        where = f"{Path(place.co_filename).name}, {place.co_name}" if place else ""
        self.errors.append(f"{kind.__name__} in {where}: {error}")
