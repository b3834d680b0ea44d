"""A trace from disk on show while a run goes on: the two are never taken for one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QApplication, QMenu
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.engine_thread.jobs import files
from app.engine_thread.jobs.files import ReadTrace
from app.panels.tokens.sequence_panels import SequencePanel
from app.window.window import MainWindow
from engine.analysis.breaks import BreakRule
from engine.trace.export import export_csv
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import enabled, job_ends, messages, trigger, wait

BEHIND = "info: Run 0 is paused in the background."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported trace whose only run has the id of the first live one."""
    export_csv(sample_trace(rounds=4).store, tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def behind(loaded: MainWindow, engine: FakeEngine, folder: Path, qtbot: QtBot) -> MainWindow:
    """A paused run after an opened trace."""
    engine.rounds = 10**9
    trigger(loaded, "run.step")
    wait(qtbot, loaded, State.PAUSED)
    show(loaded, folder, qtbot)
    return loaded


def show(window: MainWindow, folder: Path, qtbot: QtBot) -> None:
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.sessions.open(folder)


def offers_end(window: MainWindow) -> bool:
    (panel,) = window.tokens.findChildren(SequencePanel)
    panel.customContextMenuRequested.emit(QPoint(5, 5))
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    action = menu.actions()[-1]
    assert action.objectName() == "tokens.end_sequence"
    offered = action.isEnabled()
    action.trigger()
    menu.close()
    return offered


def test_the_window_says_so_and_leads_back(behind: MainWindow, qtbot: QtBot) -> None:
    assert messages(behind) == [BEHIND]
    assert behind.status.texts["model"].endswith("opened from disk · run 0 paused")
    assert {"run.start", "run.stop"} <= enabled(behind)
    trigger(behind, "run.start")
    wait(qtbot, behind, State.RUNNING)
    assert messages(behind) == ["info: Run 0 continues in the background."]
    trigger(behind, "run.pause")
    wait(qtbot, behind, State.PAUSED)
    (banner,) = behind.banners.banners
    banner.offer_buttons[0].click()
    assert behind.feed.run == behind.bridge.live
    assert messages(behind) == []
    trigger(behind, "run.stop")
    wait(qtbot, behind, State.READY)


def test_the_end_of_the_run_takes_the_message_away(behind: MainWindow, qtbot: QtBot) -> None:
    trigger(behind, "run.stop")
    wait(qtbot, behind, State.READY)
    assert messages(behind) == []
    assert behind.bridge.trace is not None, "the trace stays"
    assert behind.status.texts["model"].endswith("opened from disk")


def test_a_dismissed_message_comes_with_the_next_change(behind: MainWindow, qtbot: QtBot) -> None:
    behind.banners.banners[0].dismissed.emit()
    assert messages(behind) == []
    trigger(behind, "run.step")
    wait(qtbot, behind, State.PAUSED)
    assert messages(behind) == [BEHIND]


def test_a_sequence_of_the_trace_is_not_that_of_the_run(
    behind: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    assert behind.feed.run is not None and behind.bridge.live is not None
    assert behind.feed.run.run_id == behind.bridge.live.run_id == 0
    assert not offers_end(behind)
    behind.bridge.close_trace()
    assert offers_end(behind), "the run itself"
    trigger(behind, "run.step")
    wait(qtbot, behind, State.PAUSED)
    assert engine.cancelled == [(0, 1)]


def test_a_break_leaves_the_trace_on_show(behind: MainWindow, qtbot: QtBot) -> None:
    shown = behind.feed.run
    behind.breaks.add(BreakRule.parse("depth >= 2"))
    trigger(behind, "run.start")
    wait(qtbot, behind, State.PAUSED)
    assert behind.feed.run == shown and behind.feed.cursor is None
    (banner,) = [b for b in behind.banners.banners if "A break rule matched" in b.message]
    banner.offer_buttons[0].click()
    assert behind.feed.run == behind.bridge.live
    assert behind.feed.cursor is not None
    assert (behind.feed.cursor.run, behind.feed.cursor.round) == (behind.bridge.live, 1)


def test_a_trace_that_comes_late_is_offered(
    loaded: MainWindow,
    engine: FakeEngine,
    folder: Path,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = files.open_trace
    monkeypatch.setattr(files, "open_trace", lambda *a, **k: (engine.gate.wait(), read(*a, **k))[1])
    engine.gate.clear()
    loaded.sessions.open(folder)
    trigger(loaded, "run.start")
    qtbot.waitUntil(lambda: loaded.feed.run is not None)
    live = loaded.feed.run
    with job_ends(qtbot, loaded.bridge, ReadTrace):
        engine.gate.set()
    wait(qtbot, loaded, State.READY)
    assert loaded.feed.run == live, "the run that was started since stays on show"
    assert messages(loaded) == ["info: The trace mine has been read."]
    loaded.banners.banners[0].offer_buttons[0].click()
    assert loaded.bridge.trace_folder == folder
    assert loaded.feed.run != live
    trigger(loaded, "file.close_trace")
    assert loaded.feed.run == live


def test_a_trace_without_runs_shows_nothing_of_the_session(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    from engine.trace.store import TraceStore

    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    loaded.bridge.show_trace(tmp_path, TraceStore())
    assert loaded.feed.run is None
    assert loaded.tokens.copy_text() == ""
    assert "file.export" not in enabled(loaded)
