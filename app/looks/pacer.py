"""Limits how often slow work is done, so that painting and the engine keep their time."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QElapsedTimer, QObject, QTimer

SHARE = 0.015
"""Of the thread's time, for one kind of work: what the window takes, the engine lacks."""
_LONGEST_MS = 1000


class Pacer(QObject):
    """Calls a function when asked, but no more often than every `period_ms`, nor so often that it
    would take more than its SHARE of the time (as long as it is called once a second).

    The first call happens at once; what is asked for too early happens when the time has come.
    """

    def __init__(self, work: Callable[[], None], period_ms: int, parent: QObject) -> None:
        super().__init__(parent)
        self._work, self._period = work, period_ms
        self._wait = period_ms
        self._since = QElapsedTimer()
        self._begun = 0.0
        self._timer, self._painted = QTimer(self), QTimer(self)
        for timer, does in ((self._timer, self.now), (self._painted, self._count)):
            timer.setSingleShot(True)
            timer.timeout.connect(does)

    def ask(self) -> None:
        if self._timer.isActive():
            return
        left = self._wait - self._since.elapsed() if self._since.isValid() else 0
        if left <= 0:
            self.now()
        else:
            self._timer.start(left)

    def now(self) -> None:
        """Call the function at once, whatever the period."""
        self._timer.stop()
        self._begun = time.thread_time()
        self._work()
        self._since.start()
        self._count()
        self._painted.start(0)  # which comes after the painting of what has changed

    def _count(self) -> None:
        """Set the time to the next call by what this one has taken by now."""
        cost = 1e3 * (time.thread_time() - self._begun)
        self._wait = max(self._period, round(min(cost / SHARE, _LONGEST_MS)))

    def stop(self) -> None:
        """Forget what was asked for; the next call happens at once."""
        self._timer.stop()
        self._painted.stop()
        self._since.invalidate()
