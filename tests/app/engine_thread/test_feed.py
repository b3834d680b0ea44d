"""The feed reads a run that comes on show once, and what joins it with the next frame."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.engine_thread import feed as feed_module
from app.engine_thread.feed import FRAME_MS, SLOWEST_FRAME_MS, Feed
from app.trace_models.run_rows import Position
from engine.trace.run_ref import RunRef
from tests.support.timed_trace import add_rounds, timed_trace


class Clock:
    """The thread's time and the wall's, which move only where a test says so."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now

    monotonic = thread_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feed_module, "time", clock)
    return clock


class _Counting:
    def __init__(self) -> None:
        self.shown = self.refreshed = 0

    def show_run(self, run: RunRef | None) -> None:
        self.shown += 1

    def refresh(self) -> None:
        self.refreshed += 1

    def set_cursor(self, position: Position | None) -> None:
        """Does nothing."""


def test_a_run_that_comes_on_show_is_read_once(qtbot: QtBot) -> None:
    store, _, run_id = timed_trace(8)
    owner, view = QObject(), _Counting()
    feed = Feed(owner)
    feed.add([view])
    feed.show_run(RunRef(store, run_id))
    assert (view.shown, view.refreshed) == (1, 0)
    feed.start()
    for _ in range(3):
        with qtbot.waitSignal(feed._timer.timeout):
            pass
    assert view.refreshed == 0, "nothing is new"
    add_rounds(store, run_id, 8, 12)
    qtbot.waitUntil(lambda: view.refreshed == 1)
    feed.stop()
    assert view.refreshed == 2, "the last state is shown"


def test_a_request_that_a_watched_client_sends_is_news(qtbot: QtBot) -> None:
    store, _, run_id = timed_trace(8)
    store.runs[run_id]["listens_at"] = "http://127.0.0.1:8081"
    owner, view = QObject(), _Counting()
    feed = Feed(owner)
    feed.add([view])
    feed.show_run(RunRef(store, run_id))
    feed.start()
    store.runs[run_id].add_to("requests", {"seq_id": 0})
    qtbot.waitUntil(lambda: view.refreshed == 1)
    feed.stop()


def test_frames_begin_at_once_whatever_the_window_did_to_begin_a_run(
    qtbot: QtBot, clock: Clock
) -> None:
    store, _, run_id = timed_trace(8)
    owner, view = QObject(), _Counting()
    feed = Feed(owner)
    feed.add([view])
    feed.show_run(RunRef(store, run_id))
    feed.start()
    clock.now += 0.05  # a frame of that much would be followed by the longest pause
    add_rounds(store, run_id, 8, 12)
    qtbot.waitUntil(lambda: view.refreshed == 1)
    assert feed._timer.interval() == FRAME_MS
    feed.stop()


def test_a_costly_frame_is_followed_by_the_longest_pause_and_a_cheap_one_by_the_shortest(
    qtbot: QtBot, clock: Clock
) -> None:
    store, _, run_id = timed_trace(8)
    owner, view = QObject(), _Costly(clock)
    feed = Feed(owner)
    feed.add([view])
    feed.show_run(RunRef(store, run_id))
    feed.start()
    view.seconds = 0.05
    add_rounds(store, run_id, 8, 12)
    qtbot.waitUntil(lambda: view.refreshed == 1)
    qtbot.waitUntil(lambda: feed._timer.interval() == SLOWEST_FRAME_MS)
    view.seconds = 0.0
    add_rounds(store, run_id, 12, 16)
    qtbot.waitUntil(lambda: view.refreshed == 2)
    qtbot.waitUntil(lambda: feed._timer.interval() == FRAME_MS)
    feed.stop()


class _Costly(_Counting):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self.seconds = clock, 0.0

    def refresh(self) -> None:
        super().refresh()
        self._clock.now += self.seconds
