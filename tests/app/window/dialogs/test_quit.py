"""Closing the window over runs that were not exported: kept, or asked about where that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PySide6.QtWidgets import QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.files import ExportTrace
from app.saved.autosave import read_saved, saved_folders
from app.trace_models.run_facts import ModelRuns
from app.window.dialogs.files import QuitChoice, ask_before_quitting
from app.window.window import MainWindow
from engine.trace.reopen import open_trace
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import messages, trigger, wait


class Answers:
    """What the user says, and what was asked."""

    def __init__(self) -> None:
        self.quit_choice = QuitChoice.STAY
        self.asked: list[tuple[list[str], str]] = []

    def __call__(self, _: QWidget, recorded: Sequence[ModelRuns], problem: str) -> QuitChoice:
        self.asked.append(([runs.model for runs in recorded], problem))
        return self.quit_choice


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr("app.window.sessions.ask_before_quitting", answers)
    return answers


@pytest.fixture
def asking(
    make_window: Callable[..., MainWindow], engine: FakeEngine, tmp_path: Path, qtbot: QtBot
) -> Callable[[], MainWindow]:
    """Windows over one data folder that ask before they close."""

    def make() -> MainWindow:
        window = make_window(Bridge(engine), tmp_path / "data")
        window.sessions.quit_choice = None
        with qtbot.waitSignal(window.sessions.library_read):
            window.sessions.open_library()
        return window

    return make


def run_on(window: MainWindow, model: Path, qtbot: QtBot) -> None:
    with qtbot.waitSignal(window.bridge.loaded):
        window.open_model(model)
    wait(qtbot, window, State.READY)
    trigger(window, "run.start")
    wait(qtbot, window, State.READY)


def test_nothing_recorded_closes_without_a_word(
    asking: Callable[[], MainWindow], answers: Answers
) -> None:
    window = asking()
    assert window.close()
    assert answers.asked == []


def test_what_is_discarded_is_gone(
    asking: Callable[[], MainWindow], model_file: Path, qtbot: QtBot, tmp_path: Path
) -> None:
    window = asking()
    run_on(window, model_file, qtbot)
    autosave = window.sessions.autosave
    assert autosave is not None
    with qtbot.waitSignal(autosave.saved):
        autosave.save()
    window.sessions.quit_choice = QuitChoice.DISCARD
    window.close()
    assert list((tmp_path / "data" / "autosave").iterdir()) == []
    assert messages(asking()) == []


def test_runs_of_all_models_are_kept_with_their_ends_and_listed(
    asking: Callable[[], MainWindow],
    answers: Answers,
    engine: FakeEngine,
    model_file: Path,
    qtbot: QtBot,
    tmp_path: Path,
) -> None:
    window = asking()
    run_on(window, model_file, qtbot)
    run_on(window, model_file.with_name("other.gguf"), qtbot)
    engine.rounds = 10**9
    n_tokens = len(window.bridge.store.tokens)
    trigger(window, "run.start")
    qtbot.waitUntil(lambda: len(window.bridge.store.tokens) > n_tokens)
    sizes = [1, 2]
    assert window.close()
    assert answers.asked == []
    kept = [open_trace(folder) for folder in saved_folders(tmp_path / "data" / "autosave")]
    assert sorted(len(store.runs) for store in kept) == sizes
    stops = [facts["stops"] for store in kept for facts in store.runs.values()]
    assert sorted(stops) == [["limit"], ["limit"], ["stopped"]], "the run that went on was ended"
    engine.rounds = 12
    again = asking()
    assert messages(again) == []
    rows = again.runs.model.rows
    assert [(row.model, row.run.run_id) for row in rows] == [
        ("model", 0),
        ("other", 0),
        ("other", 1),
    ]
    assert all(row.on_disk and row.tokens for row in rows)
    with qtbot.waitSignal(again.bridge.rows_read):
        again.runs.run_selected.emit(rows[0].run)
    assert again.tokens.copy_text().startswith(" first a1.0")
    assert [row.on_disk for row in again.runs.model.rows] == [False, True, True]
    assert again.close(), "what was kept is on disk"
    assert answers.asked == []
    assert sorted(len(r.store.runs) for r in read_all(tmp_path)) == sizes, "and stays there"


def read_all(tmp_path: Path) -> list[ModelRuns]:
    folders = saved_folders(tmp_path / "data" / "autosave")
    return [found for folder in folders if (found := read_saved(folder))]


def test_what_was_exported_is_not_discarded(
    asking: Callable[[], MainWindow], model_file: Path, qtbot: QtBot, tmp_path: Path
) -> None:
    window = asking()
    run_on(window, model_file, qtbot)
    run_on(window, model_file.with_name("other.gguf"), qtbot)
    with qtbot.waitSignal(window.bridge.exported):
        window.bridge.ask(ExportTrace(window.bridge.store, tmp_path / "out"))
    window.sessions.quit_choice = QuitChoice.DISCARD
    window.close()
    (left,) = read_all(tmp_path)
    assert left.model == "other", "what was not exported is gone, the other is listed again"


def test_what_cannot_be_kept_keeps_the_window_open(
    asking: Callable[[], MainWindow],
    answers: Answers,
    model_file: Path,
    qtbot: QtBot,
    tmp_path: Path,
) -> None:
    window = asking()
    run_on(window, model_file, qtbot)
    (tmp_path / "data").rmdir() if (tmp_path / "data").is_dir() else None
    (tmp_path / "data").write_text("x")
    assert not window.close()
    assert answers.asked == []
    assert "error: The runs are not saved." in messages(window)[0]
    assert not window.close()
    assert [models for models, _ in answers.asked] == [["model"]]
    assert "cannot be written" in answers.asked[0][1]
    assert window.isVisible()
    trigger(window, "run.start")
    wait(qtbot, window, State.READY)
    assert len(window.runs.model.rows) == 2, "it works on"
    answers.quit_choice = QuitChoice.DISCARD
    assert window.close()


def test_an_interrupt_does_not_ask_and_ends_the_second_time(
    asking: Callable[[], MainWindow],
    answers: Answers,
    model_file: Path,
    qtbot: QtBot,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    window = asking()
    run_on(window, model_file, qtbot)
    (tmp_path / "data").rmdir() if (tmp_path / "data").is_dir() else None
    (tmp_path / "data").write_text("x")
    window.sessions.interrupt()
    assert window.isVisible() and answers.asked == []
    assert "Ctrl-C again" in caplog.text
    assert not window.close()
    assert len(answers.asked) == 1, "who closes it by hand is asked"
    window.sessions.interrupt()
    assert not window.isVisible() and len(answers.asked) == 1


# -- the question itself -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("button", "quit_choice"),
    [("default", QuitChoice.STAY), ("escape", QuitChoice.STAY), ("Discard", QuitChoice.DISCARD)],
)
def test_the_question(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, button: str, quit_choice: QuitChoice
) -> None:
    parent = QWidget()
    qtbot.addWidget(parent)
    seen: list[str] = []

    def answer(box: QMessageBox) -> int:
        seen.append(box.informativeText())
        known = {b.text().replace("&", ""): b for b in box.buttons()}
        known |= {"default": box.defaultButton(), "escape": box.escapeButton()}
        known[button].click()
        return 0

    monkeypatch.setattr(QMessageBox, "exec", answer)
    store = sample_trace(rounds=2).store
    models = [ModelRuns("a", store), ModelRuns("b", store)]
    assert ask_before_quitting(parent, models, "The disk is full.") is quit_choice
    assert seen == ["a: 1 run\nb: 1 run\n\nThe disk is full. Cancel to export them (Ctrl+E)."]
