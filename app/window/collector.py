"""Garbage collection on the window's thread only.

A cyclic collection that happens to run on the engine's thread may destroy Qt objects there,
which Qt does not allow. So automatic collection is off and timers collect here instead.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

YOUNG_MS = 1_000
FULL_MS = 20_000


class Collector(QObject):
    """Collects young objects often and all objects seldom, until `stop`."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._timers = []
        for generation, period in ((1, YOUNG_MS), (2, FULL_MS)):
            timer = QTimer(self)
            timer.setInterval(period)
            timer.timeout.connect(lambda g=generation: gc.collect(g))
            self._timers.append(timer)

    def start(self) -> None:
        """Take over from Python's own collection."""
        gc.disable()
        for timer in self._timers:
            timer.start()

    def stop(self) -> None:
        """Give it back."""
        for timer in self._timers:
            timer.stop()
        gc.enable()
