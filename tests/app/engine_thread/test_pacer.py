"""How often slow work is done: by what it takes, its painting included."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread import feed
from app.engine_thread.feed import PACED_SHARE, Pacer

SINCE_MS = 40


class Clock:
    """The thread's time, which moves only where a test says so."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now


class Stopwatch:
    """The time since the last call, always the same."""

    def __init__(self) -> None:
        self._runs = False

    def start(self) -> None:
        self._runs = True

    def invalidate(self) -> None:
        self._runs = False

    def isValid(self) -> bool:
        return self._runs

    def elapsed(self) -> int:
        return SINCE_MS


class Canvas(QWidget):
    """Painting takes `cost` seconds."""

    def __init__(self, clock: Clock, cost: float) -> None:
        super().__init__()
        self._clock, self._cost = clock, cost
        self.n_painted = 0

    def paintEvent(self, _event: QPaintEvent) -> None:
        self._clock.now += self._cost
        self.n_painted += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feed, "time", clock)
    monkeypatch.setattr(feed, "QElapsedTimer", Stopwatch)
    return clock


@pytest.mark.parametrize(("share_of_wait", "at_once"), [(0.5, True), (2.0, False)])
def test_painting_counts(clock: Clock, qtbot: QtBot, share_of_wait: float, at_once: bool) -> None:
    canvas = Canvas(clock, share_of_wait * PACED_SHARE * SINCE_MS / 1e3)
    qtbot.addWidget(canvas)
    canvas.show()
    qtbot.waitExposed(canvas)
    QApplication.processEvents()
    n_painted, calls = canvas.n_painted, []

    def work() -> None:
        calls.append(clock.now)
        canvas.update()

    paced = Pacer(work, 0, canvas)
    paced.ask()
    assert len(calls) == 1, "the first call waits for nothing"
    qtbot.waitUntil(lambda: canvas.n_painted > n_painted)
    qtbot.waitUntil(lambda: not paced._painted.isActive())
    paced.ask()
    assert (len(calls) == 2) is at_once
    paced.stop()


def test_work_alone_counts_as_well(clock: Clock, qtbot: QtBot) -> None:
    owner = QWidget()
    qtbot.addWidget(owner)
    calls = []

    def work() -> None:
        calls.append(clock.now)
        clock.now += 2 * PACED_SHARE * SINCE_MS / 1e3

    paced = Pacer(work, 0, owner)
    paced.ask()
    paced.ask()
    assert len(calls) == 1
    paced.now()
    assert len(calls) == 2, "at once, whatever it takes"
    paced.stop()
    paced.ask()
    assert len(calls) == 3, "what was asked for is forgotten, and with it the wait"
    paced.stop()
