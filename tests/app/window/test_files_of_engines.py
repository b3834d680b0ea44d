"""Files that other engines wrote, in the window, and next to runs of a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

from app.engine_thread.events import OpenRequest, State
from app.engine_thread.jobs.files import ReadTrace
from app.engine_thread.jobs.judging import DiffDrafters, TriageRuns
from app.window.window import MainWindow
from engine.errors import OptionError
from engine.observe.rescoring.rescore import Rescored, SameModelUnknownError
from engine.trace.facts import RescoredSequence
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.scripted_replies import CAPTURES, Reply, changed, stream
from tests.support.scripted_server import ScriptedServer
from tests.support.server_acts import PLOTS, connect, in_use, run, until
from tests.support.window_acts import drop, enabled, job_ends, messages, settle, trigger


@pytest.fixture
def captures() -> Path:
    if not CAPTURES.is_dir():
        pytest.skip("the captures are not here")
    return CAPTURES


def open_file(qtbot: QtBot, window: MainWindow, path: Path) -> None:
    with job_ends(qtbot, window.bridge, ReadTrace):
        assert drop(window, path)
    assert window.bridge.trace_folder == path, messages(window)


FILES = (
    "mtp.json.gz",
    "qwen3next.json.gz",
    "chain.json.gz",
    "utf8.json.gz",
    "constructed/vllm-detailed-stream.json",
    "constructed/sglang-generate.json",
    "constructed/vllm-metrics.prom",
    "constructed/aiperf-record.json",
)


def test_what_other_engines_wrote_is_dropped_and_shown(
    window: MainWindow, captures: Path, qtbot: QtBot
) -> None:
    for path in (captures / name for name in FILES if (captures / name).exists()):
        open_file(qtbot, window, path)
        assert window.feed.run is not None, path.name
        assert not [text for text in messages(window) if text.startswith("error")], path.name
        for dock in ("runs", "findings", "inspector", "divergence", *PLOTS):
            window.docks.reveal(dock)
            settle(qtbot)
            window.docks[dock].grab()
        assert "not observed" in window.runs.detail.text(), path.name
        trigger(window, "file.close_trace")
        assert window.feed.run is None


def test_two_captures_are_laid_over_each_other_and_over_a_run_of_a_server(
    at_servers: MainWindow, captures: Path, server: ScriptedServer, qtbot: QtBot
) -> None:
    open_file(qtbot, at_servers, captures / "mtp.json.gz")
    open_file(qtbot, at_servers, captures / "draft.json.gz")
    rows = at_servers.runs.model.rows
    assert [row.model for row in rows] == ["mtp.json.gz", "draft.json.gz"]
    with job_ends(qtbot, at_servers.bridge, TriageRuns):
        at_servers.feed.set_overlay(rows[0].run)
    assert "Verdict: " in at_servers.runs.pair.text.text()
    connect(qtbot, at_servers, server.url)
    run(qtbot, at_servers)
    rows = at_servers.runs.model.rows
    assert len(rows) == 3 and at_servers.bridge.trace is None
    with job_ends(qtbot, at_servers.bridge, TriageRuns) as triaged:
        at_servers.feed.set_overlay(rows[1].run)
    assert triaged.args[0].found.verdict == "same", "the server replays the capture"
    assert not messages(at_servers)
    with job_ends(qtbot, at_servers.bridge, DiffDrafters):
        trigger(at_servers, "run.drafter_diff")
    (said,) = messages(at_servers)
    assert said.startswith("info: No cause found: drafts, acceptance rule and counts agree"), said
    assert "B is run 0 of mtp.json.gz" in said
    at_servers.banners.banners[0].findChildren(QPushButton)[0].click()
    assert "drafts after the same text are equal" in QGuiApplication.clipboard().text()
    at_servers.runs.run_selected.emit(rows[1].run)
    assert at_servers.bridge.trace_folder == captures / "mtp.json.gz"
    trigger(at_servers, "file.close_trace")
    assert len(at_servers.runs.model.rows) == 2


def test_x_goes_to_where_two_runs_part(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    pieces = stream(server.capture["requests"][0])
    connect(qtbot, at_servers, server.url)
    run(qtbot, at_servers)
    first = at_servers.feed.run

    def other(i: int, event: Any) -> Any:
        if i == 40:
            event |= {"content": " other", "tokens": [7]}
        return event

    server.script("/completion", Reply(changed(pieces, other)))
    run(qtbot, at_servers)
    assert first is not None
    with job_ends(qtbot, at_servers.bridge, TriageRuns):
        at_servers.feed.set_overlay(first)
    assert "Verdict" in at_servers.runs.pair.text.text()
    trigger(at_servers, "go.first_divergence")
    cursor = at_servers.feed.cursor
    assert cursor is not None and cursor.pos is not None
    tokens = cursor.run.store.tokens
    here = [
        tokens.row(row)
        for row in range(len(tokens))
        if tokens.row(row)["run_id"] == cursor.run.run_id and tokens.row(row)["pos"] == cursor.pos
    ]
    assert [row["token_id"] for row in here] == [7]


def test_a_run_is_rescored_once_the_user_says_that_the_model_is_the_same(
    at_servers: MainWindow,
    server: ScriptedServer,
    qtbot: QtBot,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Path] = []
    rescored: list[RunRef] = []

    def opening(request: OpenRequest, _: object) -> Any:
        opened.append(request.target)
        return SimpleNamespace(
            info=SimpleNamespace(n_vocab=0), tokenizer=SimpleNamespace(piece=None)
        )

    def rescore(_: object, store: TraceStore, run_id: int, *_more: object, **how: bool) -> Rescored:
        rescored.append(RunRef(store, run_id))
        if len(rescored) == 3:
            raise OptionError("The run is of another model.", "Open its file.")
        if not how["assume_same"]:
            raise SameModelUnknownError("Nothing tells whether the model is the same.", "Say so.")
        judged = (RescoredSequence(0, n_tokens=3, n_first=3),)
        return Rescored(run_id, "draftscope", "f32", {}, "same", None, judged)

    monkeypatch.setattr("app.engine_thread.jobs.judging.open_engine", opening)
    monkeypatch.setattr("engine.observe.rescoring.rescore.rescore", rescore)
    connect(qtbot, at_servers, server.url)
    assert "run.rescore" not in enabled(at_servers), "there is no run yet"
    run(qtbot, at_servers)
    monkeypatch.setattr("app.window.run_control.ask_model", lambda *_: model_file)
    trigger(at_servers, "run.rescore")
    until(qtbot, lambda: bool(messages(at_servers)))
    (banner,) = at_servers.banners.banners
    assert "Nothing tells" in banner.message and at_servers.bridge.state is State.READY
    assert opened == [model_file]
    next(b for b in banner.findChildren(QPushButton) if "anyway" in b.text()).click()
    until(qtbot, lambda: any("3 tokens re-scored in f32" in text for text in messages(at_servers)))
    assert rescored == [at_servers.feed.run] * 2 and opened == [model_file] * 2
    trigger(at_servers, "run.rescore")
    until(qtbot, lambda: any("another model" in text for text in messages(at_servers)))
    assert at_servers.bridge.state is State.READY and in_use(at_servers) == server.url
