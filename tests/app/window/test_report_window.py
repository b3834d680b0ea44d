"""File, Report and File, Share: the run or comparison on show, or the session, as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QPushButton
from pytestqt.qtbot import QtBot

from app.engine_thread.jobs.files import WriteFile
from app.trace_models.run_comparison import compare_runs
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.lane_traces import faulty_comparison
from tests.support.trace_builder import TraceBuilder, sample_trace
from tests.support.window_acts import enabled, job_ends, messages

pytestmark = pytest.mark.shares_window


def write(
    window: MainWindow,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
    store: TraceStore,
    to: Path,
    action: str = "file.report",
) -> None:
    """Open the trace and ask for its report, or for the page of its runs."""
    export_csv(store, to.parent / "trace")
    with qtbot.waitSignal(window.bridge.trace_shown):
        window.sessions.open(to.parent / "trace")
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_, **__: (str(to), ""))
    window.settings.set_folder("report", to.parent)
    assert {"file.report", "file.share"} <= set(enabled(window))
    window.actions_by_id[action].trigger()


def test_a_run_with_hostile_tokens(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "file.report" not in enabled(window)
    builder = TraceBuilder()
    builder.prompt(["</pre><script>"])
    builder.plain("<img src=x>")
    builder.store.runs[0]["model"] = {"name": "<b>model</b>.gguf"}
    with job_ends(qtbot, window.bridge, WriteFile):
        write(window, qtbot, monkeypatch, builder.store, tmp_path / "page")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>Speculative decoding of &lt;b&gt;model&lt;/b&gt;.gguf</h1>" in page
    assert not any(tag in page for tag in ("<script", "<img", "<b>model"))
    assert any(str(tmp_path / "page.html") in message for message in messages(window))


def test_a_comparison(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    with job_ends(qtbot, window.bridge, WriteFile):
        write(window, qtbot, monkeypatch, faulty_comparison().store, page)
    assert "beyond their bounds" in page.read_text(encoding="utf-8")
    opened: list[QUrl] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", opened.append)  # which opens nothing
    (banner,) = window.banners.banners
    (show,) = [one for one in banner.findChildren(QPushButton) if one.text() == "&Open"]
    show.click()
    assert [url.toLocalFile() for url in opened] == [str(page)]
    assert any("No program on this desktop opens" in message for message in messages(window))
    run = window.feed.run
    assert run is not None
    qtbot.waitUntil(lambda: f", {run.facts['lane']}" in window.status.texts["model"])


def test_a_second_run_over_the_one_on_show_is_in_the_report(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = sample_trace(rounds=3)
    other.store.runs[0]["model"] = {"name": "other.gguf"}
    store = sample_trace(rounds=5).store
    store.runs[0]["model"] = {"name": "shown.gguf"}
    page = tmp_path / "page.html"
    with job_ends(qtbot, window.bridge, WriteFile):
        write(window, qtbot, monkeypatch, store, page)
    assert "other.gguf" not in page.read_text(encoding="utf-8")
    window.feed.set_overlay(RunRef(other.store, 0))
    with job_ends(qtbot, window.bridge, WriteFile):
        window.actions_by_id["file.report"].trigger()
    found = page.read_text(encoding="utf-8")
    for text in (
        "<h1>Two runs compared: run 0 of shown and run 0 of other</h1>",
        *(pair.label for pair in compare_runs(RunRef(store, 0), RunRef(other.store, 0))),
    ):
        assert text in found, text


def test_a_file_that_cannot_be_written(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    builder = TraceBuilder()
    builder.prompt(["x"])
    folder = tmp_path / "page.html"
    folder.mkdir()
    with qtbot.waitSignal(window.bridge.failed):
        write(window, qtbot, monkeypatch, builder.store, folder)
    assert any("cannot be written" in message for message in messages(window))


def test_the_session_is_shared_from_the_run_on_show(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("bokeh")
    store, page = sample_trace(rounds=5).store, tmp_path / "page.html"
    store.runs[0]["model"] = {"name": "<b>shown</b>.gguf"}
    with job_ends(qtbot, window.bridge, WriteFile, timeout=60_000):  # Bokeh is imported
        write(window, qtbot, monkeypatch, store, page, "file.share")
    (page,) = tmp_path.glob("draftscope-session-*.html")
    found = page.read_text(encoding="utf-8")
    assert "<title>Speculative decoding of &lt;b&gt;shown&lt;/b&gt;.gguf</title>" in found
    assert '"shown":0' in found and "<b>" not in found[: found.index("Bokeh")]
    assert any(f"Page written to {page}" in message for message in messages(window))


def test_where_no_page_can_be_put_the_user_says_where(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("bokeh")
    page = tmp_path / "page.html"
    monkeypatch.setattr("app.window.dialogs.files.unwritable", lambda _: "It is full.")
    with job_ends(qtbot, window.bridge, WriteFile, timeout=60_000):
        write(window, qtbot, monkeypatch, sample_trace(rounds=5).store, page, "file.share")
    assert page.exists()


def test_a_page_that_cannot_be_written_says_what_is_missing(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    page = tmp_path / "page.html"
    with job_ends(qtbot, window.bridge, WriteFile):
        write(window, qtbot, monkeypatch, sample_trace(rounds=5).store, page, "file.share")
    assert not list(tmp_path.glob("*.html"))
    assert any("draftscope[share]" in message for message in messages(window))
