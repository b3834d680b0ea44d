"""Opening models in the window: by dialog, by drop, cancelled, refused; with a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QFileDialog, QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.engine_thread.jobs.engine import OpenModel
from app.widgets.fields import file_path
from app.window.window import MainWindow
from engine.errors import ModelFileError
from engine.trace.export import export_csv
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import drop, enabled, job_ends, messages, trigger, wait


def said(window: MainWindow) -> str:
    """The words of the status line."""
    words = window.findChild(QWidget, "status.words")
    assert isinstance(words, QWidget)
    return words.accessibleName()


def test_empty_window_offers_to_open(window: MainWindow) -> None:
    assert window.windowTitle() == "Draftscope"
    assert {"file.open", "file.open_demo"} <= enabled(window)
    assert not {"run.start", "run.pause", "run.step", "run.stop", "file.export"} & enabled(window)
    assert window.status.texts["model"] == "no model"


def test_map_appears_before_the_weights(
    window: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.gate.clear()
    window.open_model(model_file)
    wait(qtbot, window, State.LOADING)
    assert window.model_map.facts["target"] == "model.gguf"
    qtbot.waitUntil(lambda: window.status.progress_shown)
    engine.gate.set()
    wait(qtbot, window, State.READY)
    assert not window.status.progress_shown
    assert window.windowTitle() == "model — Draftscope"
    assert window.status.texts["model"] == "model · Q8_0 · f32 · ready"
    assert {"run.start", "run.step", "file.open_draft"} <= enabled(window)


def test_cancel_while_loading_leaves_a_map_that_can_be_loaded(
    window: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.gate.clear()
    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.status.progress_shown)
    assert window.tokens.empty.words[1] == "The engine is busy, as the status line says."
    window.status.cancel_asked.emit()
    wait(qtbot, window, State.INSPECTED)
    assert "Load weights" in window.tokens.empty.words[1], "Run is disabled"
    assert not window.status.progress_shown
    assert messages(window) == [], "what the user asked for is not a failure"
    engine.gate.set()
    window.model_map.load_asked.emit()
    wait(qtbot, window, State.READY)
    assert "Press Run (F5)" in window.tokens.empty.words[1]


def test_open_by_dialog_keeps_folder_and_recent_list(
    window: MainWindow, model_file: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(model_file), ""))
    trigger(window, "file.open")
    wait(qtbot, window, State.READY)
    assert QApplication.testAttribute(Qt.ApplicationAttribute.AA_DontUseNativeDialogs)
    assert window.settings.folder("model") == model_file.parent
    window.recent_menu.fill()
    names = [a.text() for a in window.recent_menu.actions() if a.text()]
    assert names == ["model.gguf", "&Clear List"]
    model_file.unlink()
    window.recent_menu.fill()
    gone = window.recent_menu.actions()[0]
    assert not gone.isEnabled()
    assert "no longer there" in gone.toolTip()
    trigger(window, "file.clear_recent")
    assert window.settings.recent_models == []


def test_dialog_left_without_a_choice_does_nothing(
    window: MainWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *a, **k: ("", ""))
    trigger(window, "file.open")
    assert window.bridge.state is State.EMPTY


def test_draft_model_joins_the_target(
    loaded: MainWindow,
    engine: FakeEngine,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model_file: Path,
) -> None:
    draft = tmp_path / "draft.gguf"
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *a, **k: (str(draft), ""))
    with qtbot.waitSignal(loaded.bridge.loaded):
        trigger(loaded, "file.open_draft")
    assert engine.opened[-1] == (model_file, (draft,), "auto")
    assert loaded.model_map.facts["draft"] == "MTP head, draft.gguf"


def test_drop_opens_the_larger_as_target(
    window: MainWindow, engine: FakeEngine, model_file: Path, tmp_path: Path, qtbot: QtBot
) -> None:
    small = tmp_path / "small.gguf"
    small.write_bytes(b"x")
    assert drop(window, small, model_file)
    wait(qtbot, window, State.READY)
    assert engine.opened == [(model_file, (small,), "auto")]


def test_a_mixed_drop_opens_all_of_it_and_the_trace_is_on_show(
    window: MainWindow, engine: FakeEngine, model_file: Path, tmp_path: Path, qtbot: QtBot
) -> None:
    export_csv(sample_trace().store, folder := tmp_path / "mine")
    (parts := tmp_path / "big-00001-of-00002.gguf").write_bytes(model_file.read_bytes() * 2)
    (second := tmp_path / "big-00002-of-00002.gguf").write_bytes(model_file.read_bytes() * 3)
    (notes := tmp_path / "notes.txt").write_text("milk, bread\n")
    engine.gate.clear()
    assert drop(window, folder / "tokens.csv", second, model_file, parts, notes)
    wait(qtbot, window, State.LOADING)
    with qtbot.waitSignal(window.bridge.trace_shown, check_params_cb=lambda shown: shown == folder):
        engine.gate.set()
    wait(qtbot, window, State.READY)
    assert engine.opened == [(parts, (model_file,), "auto")]
    assert window.bridge.trace_folder == folder and "run.start" in enabled(window)
    qtbot.waitUntil(lambda: bool(messages(window)))
    assert ["notes.txt is not recognised" in text for text in messages(window)] == [True]


def test_the_trace_opens_and_the_message_stays_where_its_model_cannot_be_loaded(
    window: MainWindow, tmp_path: Path, qtbot: QtBot
) -> None:
    export_csv(sample_trace().store, folder := tmp_path / "mine")
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.open_model(tmp_path / "letter.txt", traces=[folder])
    assert messages(window) == ["error: letter.txt: byte 0: no GGUF file. Choose another."]


def test_a_field_takes_a_dragged_text_and_leaves_files_to_the_window(
    window: MainWindow, model_file: Path, qtbot: QtBot
) -> None:
    prompt, rule = window.run_panel.prompt, window.breaks.line
    assert drop(prompt.viewport(), "def f(x):") and drop(rule, "depth >= 4")
    assert (prompt.toPlainText(), rule.text()) == ("def f(x):", "depth >= 4")
    for field in (rule, prompt.viewport()):
        with job_ends(qtbot, window.bridge, OpenModel):
            assert drop(field, model_file)
    assert (prompt.toPlainText(), rule.text()) == ("def f(x):", "depth >= 4")


def test_a_line_for_a_path_takes_that_of_a_dropped_file(qtbot: QtBot, tmp_path: Path) -> None:
    qtbot.addWidget(line := file_path("a build"))
    assert drop(line, tmp_path)
    assert line.text() == str(tmp_path)


def test_a_floating_panel_takes_files_too(
    window: MainWindow, model_file: Path, qtbot: QtBot
) -> None:
    window.docks["run"].setFloating(True)
    assert drop(window.run_panel, model_file)
    wait(qtbot, window, State.READY)


def test_an_address_is_not_taken_as_nothing_is_fetched(window: MainWindow) -> None:
    assert drop(window, "https://huggingface.co/a/b.gguf") is False


def test_bad_file_is_a_banner_and_the_window_stays_usable(
    window: MainWindow, tmp_path: Path, model_file: Path, qtbot: QtBot
) -> None:
    window.open_model(tmp_path / "letter.txt")
    qtbot.waitUntil(lambda: bool(messages(window)))
    assert messages(window) == ["error: letter.txt: byte 0: no GGUF file. Choose another."]
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    assert messages(window) == [], "a new attempt takes the old message away"


def test_weights_that_fail_leave_the_session_in_use(
    loaded: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.fail_load = ModelFileError("x.gguf", "blk.0", "gone", "Choose another.")
    loaded.open_model(model_file.with_name("x.gguf"))
    qtbot.waitUntil(lambda: bool(messages(loaded)))
    wait(qtbot, loaded, State.READY)
    assert loaded.windowTitle() == "model — Draftscope"
    assert "run.start" in enabled(loaded)


def test_compute_mode_reloads_and_a_refusal_shows_the_mode_in_use(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    with qtbot.waitSignal(loaded.bridge.loaded):
        loaded.run_panel.compute.setCurrentText("f32")
    assert engine.opened[-1][2] == "f32"
    wait(qtbot, loaded, State.READY)
    engine.fail_load = ModelFileError("x.gguf", "int8", "not here", "Use f32.")
    loaded.run_panel.compute.setCurrentText("int8")
    qtbot.waitUntil(lambda: bool(messages(loaded)))
    wait(qtbot, loaded, State.READY)
    assert loaded.run_panel.compute.currentText() == "f32"
    engine.fail_at["inspect"] = ModelFileError("x.gguf", "path", "no such file", "Check it.")
    loaded.run_panel.compute.setCurrentText("int8")
    qtbot.waitUntil(lambda: "no such file" in " ".join(messages(loaded)))
    qtbot.waitUntil(lambda: loaded.run_panel.compute.currentText() == "f32")


@pytest.mark.parametrize("action", ["run.start", "run.compare"])
def test_what_is_asked_while_the_model_loads_begins_when_it_is_in_use(
    window: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot, action: str
) -> None:
    window.run_panel.prompt.setPlainText("start")
    engine.gate.clear()
    window.open_model(model_file)
    wait(qtbot, window, State.LOADING)
    trigger(window, action)
    assert "starts when the model is loaded" in said(window)
    assert action not in enabled(window)
    assert "run.stop" in enabled(window)
    engine.gate.set()
    qtbot.waitUntil(lambda: window.bridge.live is not None)
    assert "starts when" not in said(window)
    wait(qtbot, window, State.READY)
    assert bool(engine.compared) is (action == "run.compare")


def test_a_run_that_waits_is_taken_back_by_stop_by_cancel_and_by_a_failure(
    loaded: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    for end in ("stop", "cancel", "fail"):
        engine.gate.clear()
        engine.fail_load = ModelFileError("x.gguf", "blk.0", "gone", "") if end == "fail" else None
        loaded.open_model(model_file.with_name("x.gguf"))
        wait(qtbot, loaded, State.LOADING)
        trigger(loaded, "run.start")
        if end == "stop":
            trigger(loaded, "run.stop")
            assert {"run.start", "run.compare"} <= enabled(loaded)
            assert "starts when" not in said(loaded)
        elif end == "cancel":
            loaded.bridge.cancel()
        engine.gate.set()
        wait(qtbot, loaded, State.READY)
        assert "starts when" not in said(loaded)
    assert loaded.bridge.live is None, "the model that was in use before runs nothing either"
