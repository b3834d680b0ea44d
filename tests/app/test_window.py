"""The window with a fake engine: what a user does and what is then on screen."""

from __future__ import annotations

import csv
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import QApplication, QDialog, QFileDialog, QLabel, QPushButton
from pytestqt.qtbot import QtBot

from app.bridge import Bridge
from app.dialogs.export import ExportDialog, new_folder
from app.docks import LAYOUTS, TITLES
from app.events import State
from app.feed import SLOWEST_FRAME_MS
from app.window import MainWindow
from engine.errors import ModelFileError
from tests.support.fake_session import FakeEngine

ROOT = Path(__file__).parents[2]


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    qtbot.waitUntil(lambda: window.bridge.state is state, timeout=5000)


@pytest.fixture
def loaded(window: MainWindow, model_file: Path, qtbot: QtBot) -> MainWindow:
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    return window


def trigger(window: MainWindow, action_id: str) -> None:
    action = window.actions_by_id[action_id]
    assert action.isEnabled(), action_id
    action.trigger()


def enabled(window: MainWindow) -> set[str]:
    return {a.objectName() for a in window.actions_by_id if a.isEnabled()}


def messages(window: MainWindow) -> list[str]:
    return [f"{b.severity}: {b.message} {b.remedy}".strip() for b in window.banners.banners]


def drop(window: MainWindow, *paths: Path) -> bool:
    """Drag files onto the window; whether it took them."""
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    where, buttons = QPoint(300, 300), Qt.MouseButton.LeftButton
    action, keys = Qt.DropAction.CopyAction, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(where, action, data, buttons, keys)
    enter.ignore()
    QApplication.sendEvent(window, enter)
    if not enter.isAccepted():
        return False
    QApplication.sendEvent(window, QDropEvent(QPointF(where), action, data, buttons, keys))
    return True


# -- opening -------------------------------------------------------------------------------


def test_empty_window_offers_to_open(window: MainWindow) -> None:
    assert window.windowTitle() == "Draftscope"
    assert {"file.open", "file.open_demo"} <= enabled(window)
    assert not {"run.start", "run.pause", "run.step", "run.stop", "file.export"} & enabled(window)
    assert window.status.model_text == "no model"


def test_map_appears_before_the_weights(
    window: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.gate.clear()
    window.open_model(model_file)
    wait(qtbot, window, State.LOADING)
    assert window.model_map.facts["target"] == "model.gguf"
    qtbot.waitUntil(lambda: window.status.progress_shown, timeout=5000)
    assert "run.start" not in enabled(window)
    engine.gate.set()
    wait(qtbot, window, State.READY)
    assert not window.status.progress_shown
    assert window.windowTitle() == "model — Draftscope"
    assert window.status.model_text == "model · Q8_0 · f32 · ready"
    assert {"run.start", "run.step", "file.open_draft"} <= enabled(window)


def test_cancel_while_loading_leaves_a_map_that_can_be_loaded(
    window: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.gate.clear()
    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.status.progress_shown, timeout=5000)
    window.status.cancel_asked.emit()
    wait(qtbot, window, State.INSPECTED)
    assert not window.status.progress_shown
    assert messages(window) == [], "what the user asked for is no failure"
    engine.gate.set()
    window.model_map.load_asked.emit()
    wait(qtbot, window, State.READY)


def test_open_by_dialog_keeps_folder_and_recent_list(
    window: MainWindow, model_file: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def ask(*args: object, **kwargs: object) -> tuple[str, str]:
        asked.append(kwargs["options"])
        return str(model_file), ""

    monkeypatch.setattr(QFileDialog, "getOpenFileName", ask)
    trigger(window, "file.open")
    wait(qtbot, window, State.READY)
    assert asked == [QFileDialog.Option.DontUseNativeDialog]
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
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, model_file: Path,
) -> None:  # fmt: skip
    draft = tmp_path / "draft.gguf"
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *a, **k: (str(draft), ""))
    with qtbot.waitSignal(loaded.bridge.loaded, timeout=5000):
        trigger(loaded, "file.open_draft")
    assert engine.opened[-1] == (model_file, draft, "auto")
    assert loaded.model_map.facts["draft"] == "MTP head, draft.gguf"


def test_drop_opens_the_larger_as_target(
    window: MainWindow, engine: FakeEngine, model_file: Path, tmp_path: Path, qtbot: QtBot
) -> None:
    small = tmp_path / "small.gguf"
    small.write_bytes(b"x")
    assert drop(window, small, model_file)
    wait(qtbot, window, State.READY)
    assert engine.opened == [(model_file, small, "auto")]


def test_drop_of_something_else_is_refused(window: MainWindow, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("x")
    assert not drop(window, text)
    assert not drop(window, tmp_path / "missing.gguf")


def test_prompt_box_leaves_drops_to_the_window(window: MainWindow) -> None:
    prompt = window.run_panel.prompt
    assert not prompt.acceptDrops()
    assert not prompt.viewport().acceptDrops()


def test_bad_file_is_a_banner_and_the_window_stays_usable(
    window: MainWindow, tmp_path: Path, model_file: Path, qtbot: QtBot
) -> None:
    window.open_model(tmp_path / "letter.txt")
    qtbot.waitUntil(lambda: bool(messages(window)), timeout=5000)
    assert messages(window) == ["error: letter.txt: byte 0: no GGUF file. Choose another."]
    window.open_model(model_file)
    wait(qtbot, window, State.READY)
    assert messages(window) == [], "a new attempt takes the old message away"


def test_weights_that_fail_leave_the_session_in_use(
    loaded: MainWindow, engine: FakeEngine, model_file: Path, qtbot: QtBot
) -> None:
    engine.fail_load = ModelFileError("x.gguf", "blk.0", "gone", "Choose another.")
    loaded.open_model(model_file.with_name("x.gguf"))
    qtbot.waitUntil(lambda: bool(messages(loaded)), timeout=5000)
    wait(qtbot, loaded, State.READY)
    assert loaded.windowTitle() == "model — Draftscope"
    assert "run.start" in enabled(loaded)


def test_compute_mode_reloads_and_a_refusal_shows_the_mode_in_use(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    with qtbot.waitSignal(loaded.bridge.loaded, timeout=5000):
        loaded.run_panel.compute.setCurrentText("f32")
    assert engine.opened[-1][2] == "f32"
    wait(qtbot, loaded, State.READY)
    engine.fail_load = ModelFileError("x.gguf", "int8", "not here", "Use f32.")
    loaded.run_panel.compute.setCurrentText("int8")
    qtbot.waitUntil(lambda: bool(messages(loaded)), timeout=5000)
    wait(qtbot, loaded, State.READY)
    assert loaded.run_panel.compute.currentText() == "f32"


# -- running -------------------------------------------------------------------------------


def test_run_to_the_end(loaded: MainWindow, qtbot: QtBot) -> None:
    loaded.run_panel.prompt.setPlainText("start")
    trigger(loaded, "run.start")
    assert {"run.pause", "run.stop"} <= enabled(loaded)
    assert not {"run.start", "run.step"} & enabled(loaded)
    wait(qtbot, loaded, State.READY)
    assert loaded.status.chips["acceptance"].text == "0.545"
    assert loaded.tokens.copy_text().startswith(" a1.0 last a2.0 a2.1 last a3.0 a3.1 a3.2 last")
    assert {"file.export", "file.copy_text", "run.start"} <= enabled(loaded)


def test_tokens_arrive_while_it_runs_and_idle_frames_cost_nothing(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.rounds = 10**6
    refreshed: list[int] = []
    monkeypatch.setattr(loaded.tokens, "refresh", lambda: refreshed.append(1))
    trigger(loaded, "run.start")
    qtbot.waitUntil(lambda: len(refreshed) > 3, timeout=5000)
    engine.gate.clear()
    qtbot.wait(2 * SLOWEST_FRAME_MS)
    n = len(refreshed)
    qtbot.wait(2 * SLOWEST_FRAME_MS)
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
    assert loaded.bridge.run_id == 0
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
    wait(qtbot, loaded, State.FAILED)
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
    monkeypatch.setattr(loaded.ring, "set_cursor", moved.append)
    area = loaded.tokens.areas[0]
    qtbot.mouseClick(area.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(30, 15))
    assert moved


def test_close_while_running_leaves_no_thread(
    loaded: MainWindow, engine: FakeEngine, qtbot: QtBot
) -> None:
    engine.rounds = 10**9
    trigger(loaded, "run.start")
    qtbot.waitUntil(lambda: len(loaded.bridge.store.rounds) > 2, timeout=5000)
    started = time.monotonic()
    loaded.close()
    assert time.monotonic() - started < 2
    # the window fixture looks for threads, timers and windows left behind


# -- the trace -----------------------------------------------------------------------------


def test_export_and_read_back(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *a, **k: str(tmp_path))
    trigger(loaded, "file.export")
    (dialog,) = loaded.findChildren(ExportDialog)
    assert not dialog.isModal()
    dialog.findChild(QPushButton).click()
    with qtbot.waitSignal(loaded.bridge.exported, timeout=5000) as exported:
        dialog.accept()
    folder = exported.args[0]
    assert folder.parent == tmp_path
    with (folder / "rounds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(loaded.bridge.store.rounds)
    qtbot.waitUntil(lambda: bool(messages(loaded)), timeout=5000)
    assert messages(loaded) == [f"info: Trace exported to {folder}."]


def test_export_that_fails_is_a_banner(loaded: MainWindow, qtbot: QtBot, tmp_path: Path) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    (file := tmp_path / "file").write_text("x")
    trigger(loaded, "file.export")
    (dialog,) = loaded.findChildren(ExportDialog)
    with qtbot.waitSignal(loaded.bridge.export_ended, timeout=5000):
        dialog.chosen.emit(file, False)
    dialog.reject()
    assert messages(loaded)[0].startswith("error: ")
    assert "file.export" in enabled(loaded)


def test_runs_of_the_model_before_can_still_be_exported(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path, model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    old = loaded.bridge.store
    with qtbot.waitSignal(loaded.bridge.loaded, timeout=5000):
        loaded.open_model(model_file.with_name("other.gguf"))
    assert loaded.tokens.copy_text() == ""
    exported: list[object] = []
    monkeypatch.setattr(loaded.bridge, "export", lambda store, *a, **k: exported.append(store))
    loaded.banners.banners[0].offer_buttons[0].click()
    (dialog,) = loaded.findChildren(ExportDialog)
    dialog.folder.setText(str(tmp_path))
    dialog.accept()
    assert exported == [old]


def test_export_folder_names_are_free(tmp_path: Path) -> None:
    now = time.struct_time((2026, 3, 4, 5, 6, 7, 0, 0, 0))
    first = new_folder(tmp_path, now)
    assert first.name == "draftscope-trace-20260304-050607"
    first.mkdir()
    assert new_folder(tmp_path, now).name == "draftscope-trace-20260304-050607-2"


def test_copy_goes_to_the_clipboard(loaded: MainWindow, qtbot: QtBot) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    trigger(loaded, "file.copy_text")
    assert QGuiApplication.clipboard().text() == loaded.tokens.copy_text() != ""


# -- keys, looks, layout -------------------------------------------------------------------


def test_g_toggles_ghosts_but_types_in_the_prompt(window: MainWindow, qtbot: QtBot) -> None:
    ghosts = window.actions_by_id["view.ghosts"]
    before = ghosts.isChecked()
    prompt = window.run_panel.prompt
    prompt.setFocus()
    qtbot.keyClick(prompt, Qt.Key.Key_G)
    assert prompt.toPlainText() == "g"
    assert ghosts.isChecked() is before
    window.setFocus()
    qtbot.keyClick(window, Qt.Key.Key_G)
    assert ghosts.isChecked() is not before
    assert window.settings.ghosts is not before


def test_follow_action_and_view_agree(loaded: MainWindow, qtbot: QtBot) -> None:
    follow = loaded.actions_by_id["view.follow"]
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    assert follow.isChecked()
    follow.trigger()
    assert loaded.tokens.follow is False
    loaded.tokens.set_follow(True)
    assert follow.isChecked()


@pytest.mark.parametrize("choice", ["light", "dark"])
def test_theme_is_applied_and_kept(window: MainWindow, choice: str) -> None:
    trigger(window, f"view.theme_{choice}")
    app = QApplication.instance()
    assert isinstance(app, QApplication)
    app.processEvents()
    assert app.palette().window().color() == window.theme.color("ui.window")
    assert window.theme.name == choice
    assert window.settings.theme == choice
    pixel = window.grab().toImage().pixelColor(window.width() - 5, 5)
    assert (pixel.lightness() < 128) is (choice == "dark")


def test_layout_is_kept_and_reset(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    def new() -> MainWindow:
        return make_window(Bridge(open_session=engine.open, inspect=engine.inspect))

    first = new()
    shown = {name for name in TITLES if first.docks[name].isVisible()}
    assert shown == set(LAYOUTS["stream"].shown)
    first.docks["ring"].close()
    first.resize(first.width(), 640)
    first.close()
    second = new()
    assert not second.docks["ring"].isVisible()
    assert second.height() == 640
    trigger(second, "view.reset_layout")
    assert second.docks["ring"].isVisible()


def test_spoilt_layout_gives_the_first_one(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine
) -> None:
    from PySide6.QtCore import QByteArray

    from app.settings import Settings

    Settings().set_geometry(QByteArray(b"junk"))
    Settings().set_layout("stream", QByteArray(b"junk"))
    window = make_window(Bridge(open_session=engine.open, inspect=engine.inspect))
    assert {name for name in TITLES if window.docks[name].isVisible()} == set(
        LAYOUTS["stream"].shown
    )


def test_panels_have_names_keys_and_object_names(window: MainWindow) -> None:
    for number, name in enumerate(TITLES, start=1):
        dock = window.docks[name]
        assert dock.objectName()
        assert dock.windowTitle() == TITLES[name]
        keys = f"Ctrl+{number}" if number < 10 else ""
        assert window.actions_by_id[f"view.panel_{name}"].shortcut().toString() == keys


def test_dialogs_do_not_block_and_go_away(window: MainWindow, qtbot: QtBot) -> None:
    for action in ("help.shortcuts", "help.about"):
        trigger(window, action)
    shown = [d for d in window.findChildren(QDialog) if d.isVisible()]
    assert len(shown) == 2
    assert not any(d.isModal() for d in shown)
    texts = " ".join(label.text() for d in shown for label in d.findChildren(QLabel))
    assert "PySide6" in texts
    for dialog in shown:
        dialog.reject()


def test_report_names_versions_model_and_log(loaded: MainWindow) -> None:
    trigger(loaded, "help.copy_report")
    text = QGuiApplication.clipboard().text()
    for part in ("- torch: ", "- model: model.gguf, qwen35, f32", "model identity", "```"):
        assert part in text


def test_unexpected_errors_and_old_crashes_are_banners(window: MainWindow) -> None:
    window.show_unexpected("ValueError: odd")
    window.show_crash("Fatal Python error: Segmentation fault")
    assert messages(window)[0].startswith("error: Something unexpected happened: ValueError: odd.")
    window.banners.banners[1].offer_buttons[0].click()
    assert "Segmentation" in QGuiApplication.clipboard().text()


# -- the process ---------------------------------------------------------------------------


def test_none_keeps_its_references() -> None:
    """PySide6 6.12 loses one per call and aborts after some thousands."""
    label = QLabel()
    gc.collect()
    before = sys.getrefcount(None)
    for i in range(1000):
        label.setText(str(i))
    assert abs(sys.getrefcount(None) - before) < 100


def test_window_is_visible_before_torch_is_imported(tmp_path: Path) -> None:
    code = """
import sys, time
started = time.monotonic()
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication
from app.gui import run_window
app = QApplication([])
def look():
    window = next(w for w in app.topLevelWidgets() if w.objectName() == "main")
    print(window.isVisible(), "torch" in sys.modules, round(time.monotonic() - started, 2))
    window.close()
QTimer.singleShot(0, look)
print(run_window([], None, False))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "QT_QPA_PLATFORM": "offscreen",
            "XDG_DATA_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split()[:2] == ["True", "False"], done.stderr
    assert done.stdout.split()[-1] == "0"
