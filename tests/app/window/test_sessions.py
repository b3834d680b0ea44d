"""Traces in the window: opened without a model, exported, copied as an issue."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QMimeData, Qt, QUrl
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QLineEdit
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.engine_thread.jobs.files import ReadTrace
from app.saved.settings import Settings
from app.window.dialogs.files import TraceDialog
from app.window.sessions import what_is
from app.window.window import MainWindow
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.reopen import open_trace
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import TraceBuilder
from tests.support.window_acts import drop, enabled, job_ends, messages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported trace of two runs, the second with a rejected draft and a finding."""
    builder = TraceBuilder()
    builder.prompt(["old"])
    builder.plain(" gone")
    builder = TraceBuilder(builder.store)
    builder.store.runs[1]["model"] = {"name": "other.gguf", "sha256": "cafe"}
    builder.store.runs[1]["options"] = {"n_predict": 7}
    builder.prompt(["it"])
    builder.plain(" was once")
    number = builder.draft([" upon"], " a|`b", [" the"])
    builder.slots(("live", "fresh", "free"), number)
    builder.plain(" time")
    builder.store.findings.append(
        run_id=1,
        round=2,
        seq_id=0,
        rule="stale-plane",
        severity="error",
        message="It is stale.",
        evidence="depth 1 > 0",
    )
    export_csv(builder.store, tmp_path / "mine")
    return tmp_path / "mine"


def shown(window: MainWindow, qtbot: QtBot, folder: Path) -> None:
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.sessions.open(folder)


def test_a_trace_opens_without_a_model(window: MainWindow, qtbot: QtBot, folder: Path) -> None:
    shown(window, qtbot, folder)
    assert window.tokens.copy_text() == " was once upon a|`b time"
    assert window.windowTitle() == "mine — Draftscope"
    assert window.status.texts["model"].startswith("trace ")
    assert window.status.chips["acceptance"].text == "0.500"
    assert window.bridge.state is State.EMPTY
    assert {"file.export", "file.copy_issue", "file.close_trace"} <= enabled(window)
    assert "run.start" not in enabled(window)
    assert len(window.findings.model.rows) == 1
    for view in (window.plots.rollback, window.plots["ring"]):
        assert view.currentIndex() == 1, "the plot, not the empty state"
    assert not window.status.progress_shown
    assert Settings().recent_traces == [folder]
    window.actions_by_id["file.close_trace"].trigger()
    assert window.windowTitle() == "Draftscope"
    assert window.tokens.copy_text() == ""
    assert "file.close_trace" not in enabled(window)
    window.actions_by_id["file.reopen_trace"].trigger()
    assert window.windowTitle() == "mine — Draftscope"
    assert window.tokens.copy_text() == " was once upon a|`b time"
    assert "file.reopen_trace" not in enabled(window)


def typed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the next dialogs answered as by a user who types a name and presses Return."""

    def answer(dialog: TraceDialog) -> int:
        (field,) = dialog.findChildren(QLineEdit, "fileNameEdit")
        field.setText(name)
        dialog.accept()
        return dialog.result()

    monkeypatch.setattr(TraceDialog, "exec", answer)


def test_a_typed_folder_without_a_trace_is_entered(
    window: MainWindow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inner := tmp_path / "inner").mkdir()
    typed(monkeypatch, str(inner))
    window.actions_by_id["file.open_trace"].trigger()
    assert not window.bridge.reading


def test_several_are_opened_and_what_is_left_is_named(
    window: MainWindow, qtbot: QtBot, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, other := tmp_path / "other")
    (notes := tmp_path / "notes.txt").write_text("milk, bread\n")
    with qtbot.waitSignals([window.bridge.trace_shown] * 2):
        assert drop(window, folder / "tokens.csv", folder, notes, other)
    assert list(window.bridge.opened.values()) == [folder, other]
    (message,) = messages(window)
    assert message.startswith("error: The format of notes.txt is not recognised")


def test_while_files_hover_no_readers_are_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.observe.files.importing", None)
    (notes := tmp_path / "notes.txt").write_text("milk, bread\n")
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in (notes, folder / "rounds.csv")])
    assert what_is(data) == ([], [], [notes, folder], [])


def models_in(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"fake")
    return folder


@pytest.mark.parametrize(
    ("names", "opened"),
    [
        (("README.md", "only.gguf"), "only.gguf"),
        (("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), "m-00001-of-00002.gguf"),
    ],
)
def test_the_only_model_of_a_dropped_folder_is_opened(
    window: MainWindow,
    engine: FakeEngine,
    qtbot: QtBot,
    tmp_path: Path,
    names: tuple[str, ...],
    opened: str,
) -> None:
    models = models_in(tmp_path / "models", *names)
    assert drop(window, models)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    assert [target for target, *_ in engine.opened] == [models / opened]
    assert not messages(window)


def test_of_several_models_in_a_dropped_folder_one_is_chosen_there(
    window: MainWindow,
    qtbot: QtBot,
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models, asked = models_in(tmp_path / "models", "a.gguf", "b.gguf"), list[str]()

    def choose(_: object, title: str, folder: str, accepted: str) -> tuple[str, str]:
        asked.append(folder)
        return str(model_file), accepted

    monkeypatch.setattr(QFileDialog, "getOpenFileName", choose)
    assert drop(window, models)
    assert not asked, "the drag's source would wait"
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    assert asked == [str(models)]


def test_a_folder_of_a_trace_with_models_is_a_trace(folder: Path) -> None:
    (folder / "a.gguf").write_bytes(b"fake")
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(folder))])
    assert what_is(data) == ([], [], [folder], [])


def test_one_that_cannot_be_read_does_not_keep_the_others_back(
    window: MainWindow, qtbot: QtBot, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, broken := tmp_path / "broken")
    (broken / "rounds.csv").write_text("nonsense\n")
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.sessions.open(broken, folder)
    assert window.bridge.trace_folder == folder
    assert len(messages(window)) == 1 and "rounds.csv" in messages(window)[0]


def test_by_dialog_menu_and_drop(
    window: MainWindow, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in (folder, folder / SESSION_FILE, folder / "rounds.csv"):
        typed(monkeypatch, str(chosen))
        with qtbot.waitSignal(window.bridge.trace_shown):
            window.actions_by_id["file.open_trace"].trigger()
        assert window.bridge.trace_folder == folder
    window.recent_menu.fill()
    (entry,) = [a for a in window.recent_menu.actions() if a.text() == "mine"]
    with qtbot.waitSignal(window.bridge.trace_shown):
        entry.trigger()
    for dropped in (folder, folder / SESSION_FILE, folder / "rounds.csv"):
        said = list[str]()
        window.status.messageChanged.connect(said.append)
        with qtbot.waitSignal(window.bridge.trace_shown):
            assert drop(window, dropped)
        assert "Drop to open mine" in said


def test_of_what_cannot_be_opened_its_reader_says_why(
    window: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("nothing of an engine\n")
    with job_ends(qtbot, window.bridge, ReadTrace):
        assert drop(window, notes)
    (message,) = messages(window)
    assert "notes.txt is not recognised" in message
    assert window.status.currentMessage() == ""


def test_a_broken_trace_is_a_banner(window: MainWindow, qtbot: QtBot, folder: Path) -> None:
    (folder / "rounds.csv").write_text("nonsense\n")
    with job_ends(qtbot, window.bridge, ReadTrace):
        window.sessions.open(folder)
    assert messages(window)[0].startswith("error: ")
    assert "rounds.csv line 1" in messages(window)[0]
    assert window.bridge.trace_folder is None
    assert Settings().recent_traces == []
    assert "file.open_trace" in enabled(window)


def test_a_run_takes_the_place_of_the_trace(
    window: MainWindow, qtbot: QtBot, folder: Path, model_file: Path
) -> None:
    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    shown(window, qtbot, folder)
    assert "run.start" in enabled(window)
    window.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    assert window.windowTitle() == "model — Draftscope"
    assert window.bridge.store is window.bridge.session_store
    assert window.tokens.copy_text().startswith(" first a1.0")
    shown(window, qtbot, folder)
    assert window.tokens.copy_text() == " was once upon a|`b time"
    window.actions_by_id["file.close_trace"].trigger()
    assert window.tokens.copy_text().startswith(" first a1.0")


def test_closing_while_reading_leaves_no_thread(window: MainWindow, folder: Path) -> None:
    window.sessions.open(folder)
    window.close()


def test_quitting_waits_for_the_export_that_goes_on(
    window: MainWindow, qtbot: QtBot, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.engine_thread.jobs import files
    from app.window.dialogs.files import ExportDialog

    shown(window, qtbot, folder)
    out = tmp_path / "out"
    out.mkdir()
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        export_csv(*args, **options)

    monkeypatch.setattr(files, "export_csv", slow)
    window.actions_by_id["file.export"].trigger()
    (dialog,) = window.findChildren(ExportDialog)
    dialog.folder.setText(str(out))
    dialog.accept()
    assert begun.wait(60)
    join = files.ExportTrace.join

    def join_once_it_goes_on(job: Any, timeout: float) -> bool:
        goes_on.set()  # no sooner than closing waits, when it would have been cancelled
        return bool(join(job, timeout))

    monkeypatch.setattr(files.ExportTrace, "join", join_once_it_goes_on)
    window.close()
    (written,) = out.iterdir()
    assert open_trace(written).size() == open_trace(folder).size()


def test_export_for_spreadsheets_is_remembered(
    window: MainWindow, qtbot: QtBot, folder: Path, tmp_path: Path
) -> None:
    from app.window.dialogs.files import ExportDialog

    shown(window, qtbot, folder)
    window.actions_by_id["file.export"].trigger()
    (dialog,) = window.findChildren(ExportDialog)
    dialog.folder.setText(str(tmp_path))
    dialog.excel.setChecked(True)
    with qtbot.waitSignal(window.bridge.exported) as exported:
        dialog.accept()
    written = exported.args[0].folder
    assert (written / "tokens.csv").read_bytes().startswith(b"\xef\xbb\xbf")
    assert open_trace(written).size() == open_trace(folder).size()
    assert Settings().excel_safe is True


def test_return_in_the_folder_exports(
    window: MainWindow, qtbot: QtBot, folder: Path, tmp_path: Path
) -> None:
    from app.window.dialogs.files import ExportDialog

    shown(window, qtbot, folder)
    window.actions_by_id["file.export"].trigger()
    (dialog,) = window.findChildren(ExportDialog)
    dialog.folder.setText(str(tmp_path / "none" / "new"))
    with qtbot.assertNotEmitted(window.bridge.exported):
        qtbot.keyClick(dialog.folder, Qt.Key.Key_Return)
    dialog.folder.setText(str(tmp_path / "new"))
    with qtbot.waitSignal(window.bridge.exported):
        qtbot.keyClick(dialog.folder, Qt.Key.Key_Return)
    assert list((tmp_path / "new").iterdir()), "a folder that is not there yet is made"


# -- copy as issue -------------------------------------------------------------------------


def copied(window: MainWindow) -> str:
    window.actions_by_id["file.copy_issue"].trigger()
    return QGuiApplication.clipboard().text()


def test_issue_has_everything_about_the_failing_round(
    window: MainWindow, qtbot: QtBot, folder: Path
) -> None:
    shown(window, qtbot, folder)
    text = copied(window)
    first = text.splitlines()[0]
    assert ", 50.0% of 2 drafted tokens accepted" in first, "after the CPU"
    for part in (
        "### Environment",
        "- sha256: cafe",
        '"n_predict": 7',
        "### Round 2, sequence 0",
        "| rejected |",
        "**error** stale-plane, round 2: It is stale. (depth 1 > 0)",
        "- rollback_depth: 1",
        r"a\|\x60b",
    ):
        assert part in text, part
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1


def test_the_selected_round_goes_before_the_failing_one(
    window: MainWindow, qtbot: QtBot, folder: Path
) -> None:
    from app.trace_models.run_rows import Position

    shown(window, qtbot, folder)
    window.feed.move_cursor(Position(window.feed.run, 0, 3, None))
    assert "### Round 3, sequence 0" in copied(window)
