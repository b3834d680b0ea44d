"""The start of the window: application, error hooks, main window, first model."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Signal
from PySide6.QtWidgets import QApplication, QWidget

from app.engine_thread.bridge import Bridge
from app.engine_thread.feed import timer
from app.saved.errors import ErrorCatcher
from app.saved.settings import Settings, data_folder
from app.window.window import MainWindow
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario, scenarios
from engine.environment import version
from engine.long_work import WAITING
from resources import MEMORY_SCRIPTS, SCENARIOS

_LATEST_MS = 500
"""A window that is never painted, because it starts minimised, counts as ready after this time."""


class FirstPaint(QObject):
    """Emits once after a widget was painted: heavy work may begin."""

    done = Signal()

    def __init__(self, widget: QWidget) -> None:
        super().__init__(widget)
        self._widget = widget
        self._late = timer(self, self._finish, _LATEST_MS, once=True)
        self._late.start()
        widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint:
            self._widget.removeEventFilter(self)
            self._late.start(0)  # after everything in the widget was painted
        return False

    def _finish(self) -> None:
        self._widget.removeEventFilter(self)
        self.done.emit()


class _Relay(QObject):
    """Passes errors of any thread to the window's thread."""

    caught = Signal(str)


def run_window(
    models: Sequence[Path], drafts: Sequence[Path], demo: bool, traces: Sequence[Path] = ()
) -> int:
    """Show the window until it is closed, with the first of `models` and `drafts`, or the
    demo, and with `traces` opened.

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
        window = MainWindow(
            Bridge(), Settings(), catcher.recent_lines, _bundled(), data=data, whole=False
        )
        relay.caught.connect(window.show_unexpected)

        signal.signal(signal.SIGINT, lambda *_: window.sessions.interrupt())

        def begin() -> None:
            window.docks.fit_screen()
            window.complete()
            window.docks.fit_screen()  # with plots in them the panels need more room
            if demo:
                window.open_demo(traces)
            elif models:
                window.open_model(models[0], *drafts, traces=traces)
            else:
                window.sessions.read(traces)
            window.sessions.open_library()

        if catcher.last_crash:
            window.show_crash(catcher.last_crash)
        FirstPaint(window).done.connect(begin)
        window.show()
        status = app.exec()
    finally:
        collector.stop()
        catcher.uninstall()
    if not window.bridge.close(0):  # its thread is within a round, and Python would wait
        os._exit(status)
    return status


def _bundled() -> Iterator[Scenario | MemoryScript]:
    from engine.compare.memory_script_parser import memory_scripts

    yield from scenarios(SCENARIOS)
    yield from memory_scripts(MEMORY_SCRIPTS)


YOUNG_MS = 1_000
FULL_MS = 20_000
_MANY_MODULES = 100
"""Libraries for plots and decoding import at least this many modules."""


class Collector(QObject):
    """Garbage collection in the window's thread, young objects often and all objects seldom, until
    `stop`. Objects of imported libraries are frozen: otherwise the first full collection would
    block the window for 0.2 s, and with 600 rounds each one for 50 ms.

    Automatic collection in the engine's thread might destroy Qt objects there, which Qt forbids. So
    it is off, and timers collect here instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timers = []
        self._n_modules = 0
        for generation, period in ((1, YOUNG_MS), (2, FULL_MS)):
            self._timers.append(timer(self, partial(self._collect, generation), period))

    def start(self) -> None:
        """Replace Python's own collection."""
        gc.disable()
        for one in self._timers:
            one.start()

    def stop(self) -> None:
        """Restore it."""
        for one in self._timers:
            one.stop()
        gc.unfreeze()
        gc.enable()

    def _collect(self, generation: int) -> None:
        if WAITING:  # with a million objects of a file it would take a second
            return
        if len(sys.modules) >= self._n_modules + _MANY_MODULES:
            self._n_modules = len(sys.modules)
            gc.freeze()
        gc.collect(generation)
