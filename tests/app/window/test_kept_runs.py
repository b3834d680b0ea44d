"""Runs that the window saves by itself, and what a crash left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.saved import autosave as saving
from app.window.window import MainWindow
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import TraceBuilder, sample_trace
from tests.support.window_acts import messages


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def saving_window(
    make_window: Callable[..., MainWindow], engine: FakeEngine, data: Path, qtbot: QtBot
) -> Callable[[], MainWindow]:
    def make() -> MainWindow:
        window = make_window(Bridge(engine), data)
        with qtbot.waitSignal(window.sessions.library_read):
            window.sessions.open_library()
        return window

    return make


def with_model(
    window: MainWindow, model_file: Path, qtbot: QtBot
) -> tuple[MainWindow, saving.Autosave]:
    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.bridge.can_start)
    assert window.sessions.autosave is not None
    return window, window.sessions.autosave


def crashed(data: Path) -> None:
    builder = TraceBuilder()
    builder.prompt(["x"])
    builder.plain(" saved")
    export_csv(builder.store, data / "autosave" / "session-20260101-000000-1-2")


def test_runs_are_saved_and_a_clean_end_takes_them_away(
    saving_window: Callable[[], MainWindow], data: Path, model_file: Path, qtbot: QtBot
) -> None:
    window = saving_window()
    assert messages(window) == []
    _, autosave = with_model(window, model_file, qtbot)
    window.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    with qtbot.waitSignal(autosave.saved):
        autosave.save()
    assert open_trace(autosave.folder_of(window.bridge.store)).size() == window.bridge.store.size()
    window.close()
    assert list((data / "autosave").iterdir()) == []


def test_a_run_that_has_ended_is_saved_soon(
    saving_window: Callable[[], MainWindow],
    model_file: Path,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "SOON_MS", 10)
    window, saves = with_model(saving_window(), model_file, qtbot)
    with qtbot.waitSignal(saves.saved):
        window.actions_by_id["run.start"].trigger()
    assert not window.bridge.has_run and saves.is_saved(window.bridge.store)


def test_a_run_is_saved_before_it_is_half_a_minute_old(
    saving_window: Callable[[], MainWindow],
    engine: FakeEngine,
    model_file: Path,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "EARLY_MS", 1000)
    window, saves = with_model(saving_window(), model_file, qtbot)
    engine.rounds = 10**6
    going: list[bool] = []
    saves.saved.connect(lambda: going.append(window.bridge.has_run))
    window.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: len(window.bridge.store.rounds) > 3)
    engine.gate.clear()  # a run without a brake writes faster than it is exported
    qtbot.waitUntil(lambda: bool(going))
    engine.gate.set()
    assert going[0] and open_trace(saves.folder_of(window.bridge.store)).size() > 0
    window.actions_by_id["run.stop"].trigger()
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)


def test_what_a_crash_left_is_listed_and_stays(
    saving_window: Callable[[], MainWindow], data: Path, qtbot: QtBot
) -> None:
    crashed(data)
    window = saving_window()
    (message,) = messages(window)
    assert message.startswith("info: The last session ended in the middle of a run.")
    (row,) = window.runs.model.rows
    assert row.stop == "interrupted"
    (show,) = window.banners.banners[0].offer_buttons
    show.click()
    assert window.docks["runs"].isVisible()
    with qtbot.waitSignal(window.bridge.rows_read):
        window.runs.run_selected.emit(row.run)
    assert window.tokens.copy_text() == " saved"
    window.close()
    again = saving_window()
    assert [row.stop for row in again.runs.model.rows] == ["interrupted"]
    assert messages(again) == [], "it is given once"


def test_a_model_opened_over_kept_runs_says_where_they_are(
    saving_window: Callable[[], MainWindow], data: Path, model_file: Path, qtbot: QtBot
) -> None:
    window = saving_window()
    assert window.tokens.empty.words[0] == "No run yet"
    window.close()
    crashed(data)
    window = saving_window()
    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.bridge.can_start)
    assert window.tokens.currentWidget() is window.tokens.empty
    title, text = window.tokens.empty.words
    assert title == "No run shown" and text.endswith("One run is kept in Runs.")


def test_a_damaged_one_is_told_and_the_rest_opens(
    saving_window: Callable[[], MainWindow], data: Path
) -> None:
    crashed(data)
    export_csv(sample_trace(rounds=2).store, data / "autosave" / "session-1")
    broken = data / "autosave" / "session-20260101-000000-1-2"
    (broken / SESSION_FILE).write_text("{")
    window = saving_window()
    assert len(window.runs.model.rows) == 1
    (message,) = [text for text in messages(window) if text.startswith("error")]
    assert str(broken / SESSION_FILE) in message
    (banner,) = [one for one in window.banners.banners if one.severity == "error"]
    banner.offer_buttons[0].click()
    assert not broken.exists()


def test_an_empty_store_is_never_saved(saving_window: Callable[[], MainWindow], data: Path) -> None:
    window = saving_window()
    autosave = window.sessions.autosave
    assert autosave is not None
    assert isinstance(window.bridge.session_store, TraceStore)
    autosave.save()
    assert not (data / "autosave").exists()
