"""What leaves the window: exported traces and copied text, with a fake engine."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.engine_thread.jobs.files import ExportTrace
from app.window.dialogs.files import ExportDialog, new_folder
from app.window.window import MainWindow
from tests.support.window_acts import enabled, job_ends, messages, trigger, wait


def test_export_and_read_back(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *a, **k: str(tmp_path))
    trigger(loaded, "file.export")
    (dialog,) = loaded.findChildren(ExportDialog)
    assert not dialog.isModal()
    dialog.activateWindow()
    qtbot.waitUntil(dialog.isActiveWindow)
    dialog.folder.setFocus()
    qtbot.keyClick(dialog.folder, Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    with qtbot.waitSignal(loaded.bridge.exported) as exported:
        dialog.accept()
    folder = exported.args[0].folder
    assert folder.parent == tmp_path
    with (folder / "rounds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(loaded.bridge.store.rounds)
    qtbot.waitUntil(lambda: bool(messages(loaded)))
    assert messages(loaded) == [f"info: Trace exported to {folder}."]


def test_export_that_fails_is_a_banner(loaded: MainWindow, qtbot: QtBot, tmp_path: Path) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    (file := tmp_path / "file").write_text("x")
    trigger(loaded, "file.export")
    (dialog,) = loaded.findChildren(ExportDialog)
    with job_ends(qtbot, loaded.bridge, ExportTrace):
        dialog.chosen.emit(file, False)
    assert messages(loaded)[0].startswith("error: ")
    assert "file.export" in enabled(loaded)
    with qtbot.waitSignal(loaded.bridge.exported):
        dialog.chosen.emit(tmp_path / "new", False)
    dialog.reject()
    qtbot.waitUntil(lambda: [text[:4] for text in messages(loaded)] == ["info"])


def test_runs_of_the_model_before_are_listed_shown_and_exported(
    loaded: MainWindow,
    qtbot: QtBot,
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded.docks.reveal("runs")
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    old = loaded.bridge.store
    assert all(line.row for line in loaded.runs.model.lines), "one model needs no name"
    with qtbot.waitSignal(loaded.bridge.loaded):
        loaded.open_model(model_file.with_name("other.gguf"))
    wait(qtbot, loaded, State.READY)
    assert loaded.tokens.copy_text() == ""
    assert len(loaded.runs.model.rows) == 1, "still there"
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    loaded.runs.refresh_numbers()
    model = loaded.runs.model
    assert [model.index(line, 0).data() for line in range(4)] == [
        "▾ model",
        "   0",
        "▾ other",
        "   1",
    ], "numbers go on"
    assert loaded.actions_by_id["plot.overlay"].isEnabled(), "over a run of another model too"
    loaded.runs.run_selected.emit(model.rows[0].run)
    assert loaded.feed.run is not None and loaded.feed.run.store is old
    assert loaded.runs.model.shown == model.rows[0].run
    assert loaded.status.texts["model"] == "other · Q8_0 · f32 · ready · shown: run 0 of model"
    stores: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(loaded.bridge, "ask", lambda job, _then: stores.append(job.store))
        trigger(loaded, "file.export")
        (dialog,) = loaded.findChildren(ExportDialog)
        dialog.folder.setText(str(tmp_path))
        dialog.accept()
    assert stores == [old]
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    assert loaded.feed.run.store is loaded.bridge.session_store is not old
    assert loaded.status.texts["model"] == "other · Q8_0 · f32 · ready · shown: run 2"


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
