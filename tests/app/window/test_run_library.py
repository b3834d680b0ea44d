"""The list of all runs in the real window: names, stars, search, deletion, rows left on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QApplication, QFileDialog, QLineEdit
from pytestqt.qtbot import QtBot

from app.engine_thread import worker
from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.files import WriteFile
from app.trace_models.run_facts import ModelRuns, RunRow
from app.trace_models.run_notes import note, notes_of
from app.window import run_library
from app.window.dialogs.files import ExportDialog, QuitChoice
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.facts import RunFacts
from engine.trace.reopen import open_trace
from engine.trace.session_file import change_facts
from tests.support.fake_session import FakeEngine
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import job_ends, messages, trigger, wait


@pytest.fixture
def start(
    make_window: Callable[..., MainWindow], engine: FakeEngine, tmp_path: Path, qtbot: QtBot
) -> Callable[[], MainWindow]:
    """Windows over one data folder."""

    def make() -> MainWindow:
        window = make_window(Bridge(engine), tmp_path / "data")
        window.sessions.quit_choice = QuitChoice.KEEP
        with qtbot.waitSignal(window.sessions.library_read):
            window.sessions.open_library()
        window.docks.reveal("runs")
        QApplication.processEvents()
        return window

    return make


def run_on(window: MainWindow, model: Path, qtbot: QtBot, n_runs: int = 1) -> None:
    with qtbot.waitSignal(window.bridge.loaded):
        window.open_model(model)
    wait(qtbot, window, State.READY)
    for _ in range(n_runs):
        trigger(window, "run.start")
        wait(qtbot, window, State.READY)
    window.runs.refresh_numbers()


def saved(window: MainWindow, qtbot: QtBot) -> None:
    autosave = window.sessions.autosave
    assert autosave is not None
    autosave.save()
    qtbot.waitUntil(lambda: not autosave.unsaved() and not autosave.is_writing)


def rows(window: MainWindow) -> list[RunRow]:
    return window.runs.model.rows


def folders(window: MainWindow) -> list[str]:
    return [line.title for line in window.runs.model.lines if line.row is None]


def test_names_and_stars_come_back(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot
) -> None:
    window = start()
    run_on(window, model_file, qtbot, 2)
    table, model = window.runs.table, window.runs.model
    table.setFocus()
    table.setCurrentIndex(model.index(1, 3))
    qtbot.keyClick(table, Qt.Key.Key_F2)
    (editor,) = table.viewport().findChildren(QLineEdit)
    editor.setText("baseline  of Q8")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: rows(window)[1].name == "baseline of Q8")
    star = model.index(0, model.column_of("star"))
    table.clicked.emit(star)
    assert star.data() == "★"
    saved(window, qtbot)
    window.runs.star_asked.emit(rows(window)[1].run, True)  # after what was saved
    assert window.feed.run == rows(window)[1].run, "a star shows no other run"
    window.run_panel.prompt.setPlainText("mine")
    window.close()
    again = start()
    assert again.run_panel.texts() == ["mine"]
    assert [(row.name, row.starred) for row in rows(again)] == [
        ("", True),
        ("baseline of Q8", True),
    ]
    assert all(row.prompt for row in rows(again)) == any(row.prompt for row in rows(again))
    assert all(row.started is not None and row.on_disk for row in rows(again))
    again.runs.rename_asked.emit(rows(again)[0].run, "first")
    again.close()
    assert [row.name for row in rows(start())] == ["first", "baseline of Q8"]


def test_searched_by_words_and_stars(window: MainWindow) -> None:
    builder = sample_trace(rounds=3)
    for facts in ({"lane": "reference"}, {"lane": "planes"}, {}):
        builder.store.begin_run(facts)
    window.feed.show_run(builder.run)
    window.docks.reveal("runs")
    window.runs.refresh_numbers()
    assert len(rows(window)) == 4
    search = window.runs.search
    search.field.setText("LANE pl")
    assert [row.title for row in rows(window)] == ["lane planes"]
    search.field.clear()
    window.runs.star_asked.emit(builder.run.sibling(3), True)
    search.stars.click()
    assert [row.run.run_id for row in rows(window)] == [3]


def test_the_prompt_of_a_run_that_goes_on_is_kept(
    start: Callable[[], MainWindow], model_file: Path, engine: FakeEngine, qtbot: QtBot
) -> None:
    """A run that the program did not live to end is listed with it."""
    window = start()
    engine.rounds = 10**9
    with qtbot.waitSignal(window.bridge.loaded):
        window.open_model(model_file)
    wait(qtbot, window, State.READY)
    trigger(window, "run.step")
    wait(qtbot, window, State.PAUSED)
    live = window.bridge.live
    assert live is not None and not notes_of(live.facts).prompt
    live.store.pieces[7] = b"def f():"
    live.store.tokens.append(run_id=live.run_id, seq_id=0, kind="prompt", token_id=7)
    window.feed.tell_numbers()
    assert notes_of(live.facts).prompt == "def f():"
    window.bridge.stop()
    wait(qtbot, window, State.READY)


def test_what_is_deleted_comes_back_and_a_run_that_goes_on_stays(
    start: Callable[[], MainWindow], model_file: Path, engine: FakeEngine, qtbot: QtBot
) -> None:
    window = start()
    run_on(window, model_file, qtbot, 3)
    table, model = window.runs.table, window.runs.model
    table.setFocus()
    for line in (2, 0):  # the one on show first
        table.setCurrentIndex(model.index(line, 0))
        qtbot.keyClick(table, Qt.Key.Key_Delete)
    assert [row.run.run_id for row in rows(window)] == [1]
    assert window.feed.run == rows(window)[0].run
    assert window.runs.undo.text() == "Deleted run 0. Undo"
    qtbot.keyClick(table, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert [row.run.run_id for row in rows(window)] == [0, 1]
    assert window.feed.run == rows(window)[1].run, "run 0 was not on show"
    assert window.runs.undo.text() == "Deleted run 2. Undo"
    window.runs.delete_asked.emit([rows(window)[1].run])
    assert window.feed.run == rows(window)[0].run
    window.runs.undo.click()
    assert window.feed.run == rows(window)[1].run, "it was, and is again"
    window.runs.offer_undo("a long name " * 20)
    assert len(window.runs.undo.text()) < 60, "as wide as the panel has to be"
    engine.rounds = 10**9
    trigger(window, "run.step")
    wait(qtbot, window, State.PAUSED)
    window.runs.delete_asked.emit([row.run for row in rows(window)] + [window.bridge.live])
    assert [row.run for row in rows(window)] == [window.bridge.live]
    assert "info: Run 3 is in progress: stop it first." in messages(window)
    window.runs.undo.click()
    trigger(window, "run.stop")
    wait(qtbot, window, State.READY)
    window.runs.delete_asked.emit([row.run for row in rows(window)])
    assert rows(window) == [] and window.runs.undo.isVisible()
    assert window.feed.run is None
    window.close()
    assert rows(start()) == [], "nothing is left of a trace without runs"


def test_arrow_keys_go_from_run_to_run(window: MainWindow, qtbot: QtBot) -> None:
    first, second = sample_trace(rounds=2), sample_trace(rounds=2)
    window.runs.set_recorded([ModelRuns("a", first.store), ModelRuns("b", second.store)])
    window.runs.show_run(second.run)
    assert folders(window) == ["a", "b"]
    window.docks.reveal("runs")
    for _ in range(2):  # over the name of its model
        qtbot.keyClick(window.runs.table, Qt.Key.Key_Up)
    with qtbot.waitSignal(window.runs.run_selected) as chosen:
        qtbot.keyClick(window.runs.table, Qt.Key.Key_Return)
    assert chosen.args == [first.run]
    window.runs.show_run(None)
    for _ in range(3):
        qtbot.keyClick(window.runs.table, Qt.Key.Key_Down)
    with qtbot.waitSignal(window.runs.run_selected) as chosen:
        qtbot.keyClick(window.runs.table, Qt.Key.Key_Return)
    assert chosen.args == [second.run]


def test_lanes_go_together(window: MainWindow) -> None:
    first = sample_trace(rounds=2).run
    store = first.store
    runs = [store.begin_run({"lane": name, "stops": ["limit"]}) for name in ("reference", "planes")]
    window.feed.show_run(first)
    window.runs.delete_asked.emit([first.sibling(runs[1])])
    assert [row.run.run_id for row in rows(window)] == [0]


def test_rows_of_old_traces_wait_on_disk(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_library, "MOST_BYTES", 0)
    window = start()
    run_on(window, model_file, qtbot)
    first, text = window.feed.run, window.tokens.copy_text()
    assert first is not None
    size = first.store.size()
    saved(window, qtbot)
    run_on(window, model_file.with_name("other.gguf"), qtbot)
    assert [row.on_disk for row in rows(window)] == [True, False]
    assert first.store.size() == 0
    before = rows(window)[0]
    assert before.tokens and before.tokens_per_second
    with qtbot.waitSignal(window.bridge.rows_read):
        window.runs.overlay_asked.emit(first)
    assert window.feed.overlay is not None and window.feed.overlay.run == first
    assert first.store.size() == size
    window.runs.run_selected.emit(first)
    assert window.tokens.copy_text() == text
    assert rows(window)[0].tokens == before.tokens
    run_on(window, model_file, qtbot)
    assert window.bridge.session_store is not first.store, "its model has started another trace"
    assert folders(window) == ["model", "other"]
    assert window.sessions.autosave is not None
    assert first.store in window.sessions.autosave.unexported()


def test_a_full_trace_is_followed_by_another_of_the_same_group(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "FULL_TRACE_BYTES", 1)
    window = start()
    run_on(window, model_file, qtbot, 2)
    assert len({row.run.store for row in rows(window)}) == 2
    assert {row.model for row in rows(window)} == {"model"}
    assert folders(window) == [], "one group needs no name"
    assert window.feed.run == window.bridge.live == rows(window)[1].run
    run_on(window, model_file, qtbot)
    assert len(rows(window)) == 3


def test_facts_are_changed_where_they_stand(tmp_path: Path) -> None:
    run = sample_trace(rounds=2).run
    export_csv(run.store, tmp_path / "kept")
    note(run, name="ü", starred=True)
    change_facts(tmp_path / "kept", {0: {"library": run.facts["library"]}})
    again = open_trace(tmp_path / "kept")
    assert notes_of(again.runs[0]) == notes_of(run.facts)
    assert again.size() == run.store.size()
    assert notes_of(RunFacts({"library": {"name": 3, "starred": "yes"}})) == notes_of(RunFacts())


def test_every_column_of_the_list_has_room_for_its_title(window: MainWindow) -> None:
    header = window.runs.table.horizontalHeader()
    for column in range(header.count()):
        assert header.sectionSize(column) >= header.sectionSizeHint(column), column


def test_numbers_go_on_from_session_to_session_and_from_model_to_model(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot
) -> None:
    window = start()
    run_on(window, model_file, qtbot, 2)
    run_on(window, model_file.with_name("other.gguf"), qtbot)
    assert [row.number for row in rows(window)] == [0, 1, 2]
    saved(window, qtbot)
    window.close()
    again = start()
    assert [row.number for row in rows(again)] == [0, 1, 2]
    run_on(again, model_file, qtbot)
    again.run_panel.prompt.setPlainText("x")
    trigger(again, "run.compare")
    wait(qtbot, again, State.READY)
    trigger(again, "run.start")
    wait(qtbot, again, State.READY)
    again.runs.refresh_numbers()
    lanes = {row.number for row in rows(again) if row.run.facts.lane}
    assert lanes == {4}, "a comparison is one"
    assert max(row.number for row in rows(again)) == 5
    again.runs.delete_asked.emit([again.feed.run])
    assert again.runs.undo.text() == "Deleted run 5. Undo"


def test_a_run_begins_again_with_its_settings(loaded: MainWindow, qtbot: QtBot) -> None:
    """Whatever Run Settings say by now."""
    panel = loaded.run_panel
    assert not loaded.actions_by_id["run.again"].isEnabled()
    panel.prompt.setPlainText("first")
    panel.n_predict.setValue(24)
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    first = loaded.feed.run
    assert first is not None
    panel.prompt.setPlainText("second")
    panel.n_predict.setValue(48)
    trigger(loaded, "run.again")
    wait(qtbot, loaded, State.READY)
    again = loaded.feed.run
    assert again is not None and again != first
    asked = [loaded.bridge.request_of(run) for run in (first, again)]
    assert asked[0] == asked[1] and asked[0] is not None and asked[0].texts == ("first",)
    assert again.facts.options == first.facts.options


def test_a_comparison_begins_again(loaded: MainWindow, engine: FakeEngine, qtbot: QtBot) -> None:
    loaded.run_panel.prompt.setPlainText("one")
    trigger(loaded, "run.compare")
    wait(qtbot, loaded, State.READY)
    loaded.run_panel.prompt.setPlainText("other")
    trigger(loaded, "run.again")
    wait(qtbot, loaded, State.READY)
    assert len(engine.compared) == 2 and engine.compared[0] == engine.compared[1]


def test_one_run_is_exported_with_its_lanes(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_panel.prompt.setPlainText("one")
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    trigger(loaded, "run.compare")
    wait(qtbot, loaded, State.READY)
    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: bool(opened.append(url.path())))
    n_lanes = len(loaded.bridge.store.runs) - 1
    for action, n_runs in (("file.export_run", n_lanes), ("file.export", n_lanes + 1)):
        trigger(loaded, action)
        (dialog,) = [one for one in loaded.findChildren(ExportDialog) if one.isVisible()]
        dialog.folder.setText(str(tmp_path))
        with qtbot.waitSignal(loaded.bridge.exported) as exported:
            dialog.accept()
        folder = exported.args[0].folder
        assert len(open_trace(folder).runs) == n_runs
        qtbot.waitUntil(lambda folder=folder: any(str(folder) in one for one in messages(loaded)))
        (button,) = loaded.banners.banners[-1].offer_buttons
        assert button.text() == "Open &Folder"
        button.click()
        assert opened[-1] == str(folder)
        assert f"warning: No program on this desktop opens {folder}." in " ".join(messages(loaded))


def test_a_number_is_saved_with_its_run_and_not_before(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot
) -> None:
    """The file of the trace does not know the second run when it starts."""
    window = start()
    run_on(window, model_file, qtbot)
    saved(window, qtbot)
    trigger(window, "run.start")
    wait(qtbot, window, State.READY)
    assert messages(window) == []


def test_a_run_becomes_a_trace_of_perfetto(
    loaded: MainWindow, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not loaded.actions_by_id["file.perfetto"].isEnabled()
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    asked = str(tmp_path / "run"), ""
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *a, **k: asked)
    with job_ends(qtbot, loaded.bridge, WriteFile):
        trigger(loaded, "file.perfetto")
    assert (tmp_path / "run.pftrace").stat().st_size > 1000
    assert f"Perfetto trace written to {tmp_path / 'run.pftrace'}." in messages(loaded)[-1]
    (button,) = loaded.banners.banners[-1].offer_buttons
    assert button.text() == "Open &Folder"
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    trigger(loaded, "file.perfetto")
    assert "pip install 'draftscope[perfetto]'" in loaded.banners.banners[-1].remedy


def test_copy_takes_the_table_that_has_the_keys(
    start: Callable[[], MainWindow], model_file: Path, qtbot: QtBot
) -> None:
    window = start()
    run_on(window, model_file, qtbot)
    window.activateWindow()
    table = window.runs.table
    table.setFocus()
    qtbot.waitUntil(table.hasFocus)
    qtbot.keyClick(table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    copied = QApplication.clipboard().text().splitlines()
    assert len(copied) == 1 + window.runs.model.rowCount()
    window.setFocus()
    trigger(window, "file.copy_text")
    assert QApplication.clipboard().text() == window.tokens.copy_text()
