"""Runs in the window with a fake engine: started, paused, stepped, failed, closed."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, Qt
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import enabled, messages, trigger, wait


def frames(qtbot: QtBot, window: MainWindow) -> None:
    """Some of them, whatever there is to paint."""
    for _ in range(3):
        with qtbot.waitSignal(window.feed._timer.timeout):
            pass


def test_run_to_the_end(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.run_panel.prompt.setPlainText("start")
    trigger(loaded, "run.start")
    assert {"run.pause", "run.stop"} <= enabled(loaded)
    assert not {"run.start", "run.step"} & enabled(loaded)
    wait(qtbot, loaded, State.READY)
    assert loaded.status.chips["acceptance"].text == "0.545"
    assert loaded.tokens.copy_text().startswith(
        " first a1.0 last a2.0 a2.1 last a3.0 a3.1 a3.2 last"
    )
    assert {"file.export", "file.copy_text", "run.start"} <= enabled(loaded)


def test_tokens_arrive_while_it_runs_and_idle_frames_cost_nothing(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.rounds = 10**6
    refreshed: list[int] = []
    monkeypatch.setattr(loaded.tokens, "refresh", lambda: refreshed.append(1))
    trigger(loaded, "run.start")
    qtbot.waitUntil(lambda: len(refreshed) > 3)
    engine.gate.clear()
    qtbot.waitUntil(engine.waits.is_set)
    frames(qtbot, loaded)
    n = len(refreshed)
    frames(qtbot, loaded)
    assert len(refreshed) == n
    engine.gate.set()
    trigger(loaded, "run.stop")
    wait(qtbot, loaded, State.READY)


def test_pause_step_resume_stop_by_keys(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    engine.rounds = 10**6
    qtbot.keyClick(loaded, Qt.Key.Key_F5)
    wait(qtbot, loaded, State.RUNNING)
    qtbot.keyClick(loaded, Qt.Key.Key_F6)
    wait(qtbot, loaded, State.PAUSED)
    assert loaded.actions_by_id["run.start"].text() == "&Resume"
    rows = len(loaded.bridge.store.rounds)
    qtbot.keyClick(loaded, Qt.Key.Key_F10)
    wait(qtbot, loaded, State.PAUSED)
    assert len(loaded.bridge.store.rounds) == rows + 1
    qtbot.keyClick(loaded, Qt.Key.Key_F5)
    assert loaded.bridge.state is State.RUNNING
    qtbot.keyClick(loaded, Qt.Key.Key_F5, Qt.KeyboardModifier.ShiftModifier)
    wait(qtbot, loaded, State.READY)
    assert loaded.bridge.live.run_id == 0
    assert loaded.actions_by_id["run.start"].text() == "&Run"


def test_each_run_is_shown_afresh(loaded: MainWindow, qtbot: QtBot) -> None:
    for _ in range(2):
        trigger(loaded, "run.start")
        wait(qtbot, loaded, State.READY)
    assert sorted(loaded.bridge.store.runs) == [0, 1]
    assert loaded.tokens.copy_text().count("a1.0") == 1


def test_engine_failure_is_a_banner_and_the_trace_stays(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    engine.fail_round = 4
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    assert "scripted failure" in messages(loaded)[0]
    assert "a3.2" in loaded.tokens.copy_text()
    engine.fail_round = None
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    assert messages(loaded) == []


def test_clicking_a_token_moves_every_view(
    loaded: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    moved: list[object] = []
    monkeypatch.setattr(loaded.plots["ring"], "set_cursor", moved.append)
    area = loaded.tokens.areas[0]
    qtbot.mouseClick(area.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(30, 15))
    assert moved


def test_close_while_running_leaves_no_thread(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    engine.rounds = 10**9
    trigger(loaded, "run.start")
    qtbot.waitUntil(lambda: len(loaded.bridge.store.rounds) > 2)
    loaded.close()
    # the window fixture looks for threads, timers and windows left behind
