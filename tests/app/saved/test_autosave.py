"""Autosave: written when dirty, gone after a clean end, found after a crash."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.engine_thread.events import DraftscopeError
from app.engine_thread.jobs.files import ExportTrace
from app.saved.autosave import Autosave, discard, saved_folders
from engine.trace.export import SESSION_FILE, export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def trace() -> TraceStore:
    builder = TraceBuilder()
    builder.prompt(["a", "b"])
    builder.draft([" c"], " d", [" e"])
    return builder.store


@pytest.fixture
def saver(tmp_path: Path, trace: TraceStore, qapp: object) -> Iterator[Autosave]:
    owner = QObject()
    made = Autosave(tmp_path / "autosave", lambda: [trace], owner)
    yield made
    made.close()


def test_saves_only_what_is_new(saver: Autosave, trace: TraceStore, qtbot: QtBot) -> None:
    assert saver.unsaved()
    with qtbot.waitSignal(saver.saved):
        saver.save()
    assert not saver.unsaved()
    assert open_trace(saver.folder_of(trace)).size() == trace.size()
    written = (saver.folder_of(trace) / SESSION_FILE).stat().st_mtime_ns
    saver.save()
    assert not saver.is_writing
    assert (saver.folder_of(trace) / SESSION_FILE).stat().st_mtime_ns == written
    trace.findings.append(run_id=0, rule="x", severity="info", message="m", evidence="e")
    assert saver.unsaved()
    with qtbot.waitSignal(saver.saved):
        saver.save()
    assert len(open_trace(saver.folder_of(trace)).findings) == 1


def test_the_timer_saves(saver: Autosave, qtbot: QtBot) -> None:
    saver._timer.setInterval(10)
    with qtbot.waitSignal(saver.saved):
        saver.start()


def test_nothing_recorded_writes_nothing(tmp_path: Path, qapp: object) -> None:
    owner = QObject()
    made = Autosave(tmp_path / "autosave", lambda: [TraceStore()], owner)
    made.save()
    made.close()
    assert not (tmp_path / "autosave").exists()


def test_what_is_discarded_is_gone_and_a_live_one_is_of_no_earlier_session(
    saver: Autosave, trace: TraceStore, qtbot: QtBot
) -> None:
    with qtbot.waitSignal(saver.saved):
        saver.save()
    parent = saver.folder_of(trace).parent
    assert saved_folders(parent) == []
    assert saver.folder_of(trace).exists()
    saver.close(discarded=[trace])
    assert list(parent.iterdir()) == []


def test_a_failure_is_logged_and_tried_again(
    tmp_path: Path, trace: TraceStore, qtbot: QtBot, caplog: pytest.LogCaptureFixture
) -> None:
    owner = QObject()
    made = Autosave(tmp_path / "autosave", lambda: [trace], owner)
    made.folder_of(trace).mkdir(parents=True)
    (made.folder_of(trace) / "foreign.txt").write_text("x")
    with caplog.at_level("WARNING", "draftscope"):
        made.save()
        qtbot.waitUntil(lambda: made._job is None)
    assert "foreign.txt" in caplog.text
    assert made.unsaved()
    made.close()


def test_a_killed_process_leaves_an_autosave(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication, QObject
from app.saved.autosave import Autosave
from tests.support.trace_builder import TraceBuilder
app = QCoreApplication([])
builder = TraceBuilder(); builder.prompt(["a"]); builder.plain(" b")
owner = QObject()
saver = Autosave(Path({str(tmp_path)!r}), lambda: [builder.store], owner)
saver.saved.connect(lambda: os.kill(os.getpid(), signal.SIGKILL))
saver.save()
app.exec()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = saved_folders(tmp_path)
    assert len(open_trace(left).tokens) == 2
    assert saved_folders(tmp_path / "none") == []


def test_none_is_too_old_and_what_is_half_written_is_cleaned(
    tmp_path: Path, trace: TraceStore
) -> None:
    for i in range(30):
        export_csv(trace, tmp_path / f"session-{i:02}")
    os.utime(tmp_path / "session-00" / SESSION_FILE, (0, 0))
    (tmp_path / ".session-90.draftscope-999999999-abcd1234.part").mkdir()
    (tmp_path / "session-80").mkdir()
    names = [f"session-{i:02}" for i in range(30)]
    assert [p.name for p in saved_folders(tmp_path)] == names
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir())[-1] == "session-29"
    discard(tmp_path / "session-01")
    assert [p.name for p in saved_folders(tmp_path)] == names[:1] + names[2:]


@pytest.mark.parametrize("ending", ["new", "old"])
def test_one_that_was_being_replaced_is_brought_back(
    tmp_path: Path, trace: TraceStore, ending: str
) -> None:
    export_csv(trace, tmp_path / "session-1")
    (tmp_path / "session-1").rename(tmp_path / f".session-1.draftscope-999999999-abcd1234.{ending}")
    (tmp_path / ".session-1.draftscope-999999999-abcd1235.part").mkdir()
    assert saved_folders(tmp_path) == [tmp_path / "session-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["session-1"]
    assert open_trace(tmp_path / "session-1").size() == trace.size()


# -- several traces, and a place that takes none -------------------------------------------


def run_of(word: str) -> TraceStore:
    builder = TraceBuilder()
    builder.prompt([word])
    builder.plain(f" {word}")
    return builder.store


def words(folder: Path) -> set[bytes]:
    return set(open_trace(folder).pieces.values())


def saved_all(saver: Autosave, qtbot: QtBot) -> None:
    saver.save()
    qtbot.waitUntil(lambda: not saver.unsaved())


def test_every_trace_is_kept_but_those_that_are_discarded(tmp_path: Path, qtbot: QtBot) -> None:
    stores = [run_of(word) for word in ("one", "two", "three")]
    owner, parent = QObject(), tmp_path / "autosave"
    saver = Autosave(parent, lambda: stores, owner)
    saved_all(saver, qtbot)
    assert [words(saver.folder_of(s)) for s in stores] == [
        {b"one", b" one"},
        {b"two", b" two"},
        {b"three", b" three"},
    ]
    export = ExportTrace(stores[1], tmp_path / "out")
    saver.note_export(export)
    assert saver.unexported() == [stores[0], stores[2]]
    stores[2].findings.append(run_id=0, rule="x", severity="info", message="m", evidence="e")
    assert saver.keep() is None
    saver.close(discarded=stores[:1])
    left = saved_folders(parent)
    assert [words(folder) for folder in left] == [{b"two", b" two"}, {b"three", b" three"}]
    assert [len(open_trace(folder).findings) for folder in left] == [0, 1]


def test_requests_without_rows_are_saved_as_they_come_and_outlast_a_trace_on_disk_alone(
    saver: Autosave, trace: TraceStore, qtbot: QtBot
) -> None:
    trace.take_rows(TraceStore())
    facts = trace.runs[0]
    for n in (1, 2):
        facts["requests"] = [{"text": f"reply {i}"} for i in range(n)]
        assert saver.unsaved() == [trace]
        saved_all(saver, qtbot)
        found = open_trace(saver.folder_of(trace)).runs[0].requests
        assert found is not None and [one.text for one in found] == ["reply 0", "reply 1"][:n]
    trace.let_go_of_rows(saver.folder_of(trace))
    assert saver.is_saved(trace), "what is in memory is not all of it"
    trace.take_rows(run_of("more"))
    assert saver.unsaved() == [trace]


def test_an_exported_trace_that_goes_on_is_unexported_again(
    saver: Autosave, trace: TraceStore, tmp_path: Path
) -> None:
    saver.note_export(ExportTrace(trace, tmp_path / "out"))
    assert not saver.unexported()
    trace.runs[0]["stops"] = ["limit"]
    assert saver.unexported() == [trace], "its end is not in the export"


def test_a_run_that_grows_meanwhile_does_not_keep_others_waiting(
    tmp_path: Path, qtbot: QtBot
) -> None:
    stores = [run_of("live"), run_of("done")]
    owner = QObject()
    saver = Autosave(tmp_path / "autosave", lambda: stores, owner)
    written: list[int] = []

    def grow() -> None:
        written.append(1)
        stores[0].findings.append(run_id=0, rule="x", severity="info", message="m", evidence="e")

    saver.saved.connect(grow)
    saver.save()
    qtbot.waitUntil(lambda: len(written) == 2 and not saver.is_writing)
    assert len(written) == 2, "what grew meanwhile is for the next time"
    assert saver.unsaved() == [stores[0]]
    saver.close()


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_place_that_takes_no_files_is_told_once(
    tmp_path: Path, qtbot: QtBot, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    owner, stores = QObject(), [run_of("one")]
    parent = tmp_path / ("file" if kind == "file" else "disk") / "autosave"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if kind == "full":
        monkeypatch.setattr("app.saved.settings.tempfile.TemporaryFile", full)
    saver = Autosave(parent, lambda: stores, owner)
    told: list[DraftscopeError] = []
    saver.failed.connect(told.append)
    for _ in range(2):
        saver.save()
    assert len(told) == 1
    assert "cannot be written" in told[0].message
    failed = saver.keep()
    assert failed is not None and failed.message == told[0].message
    if kind == "full":
        monkeypatch.undo()
        saved_all(saver, qtbot)
        assert saver.problem is None
    saver.close()
