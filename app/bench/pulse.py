"""What the window's thread does between two beats of a timer."""

from __future__ import annotations

import time

import numpy as np
from PySide6.QtCore import QObject, Qt, QTimer

BEAT_MS = 5


class Pulse(QObject):
    """Beats every 5 ms while the event loop is free, and notes two clocks at every beat.

    wall: seconds that passed. cpu: seconds that this thread computed, which other programs on the
    machine do not lengthen.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._beats: list[tuple[float, float]] = []
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.setInterval(BEAT_MS)
        self._timer.timeout.connect(self._beat)

    def start(self) -> None:
        """Forget earlier beats and begin."""
        self._beats.clear()
        self._beat()
        self._timer.start()

    def stop(self) -> None:
        """A last beat."""
        self._timer.stop()
        self._beat()

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Wall and CPU seconds from each beat to the next, float64 [beats - 1] each."""
        clocks = np.diff(np.array(self._beats), axis=0)
        return clocks[:, 0], clocks[:, 1]

    def frames(self, seconds: float) -> np.ndarray:
        """CPU seconds of the thread in spans of beats of at least `seconds`, float64 [spans]."""
        cut: list[float] = []
        begun, used = self._beats[0]
        for at, cpu in self._beats[1:]:
            if at - begun >= seconds:
                cut.append(cpu - used)
                begun, used = at, cpu
        return np.array(cut)

    def _beat(self) -> None:
        self._beats.append((time.perf_counter(), time.thread_time()))
