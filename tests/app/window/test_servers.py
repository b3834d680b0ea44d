"""The window at a server: connecting, streaming, lost, and whatever else a server may do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.jobs.engine import StartRun
from app.engine_thread.serving import ServerEngine
from app.window.dialogs.runs import ConnectDialog
from app.window.window import MainWindow
from engine.options import RunOptions
from engine.trace.records import MISSING
from tests.support.fake_session import FakeEngine
from tests.support.llama_server import free_port
from tests.support.scripted_replies import (
    WEB_PAGE,
    Hold,
    Raw,
    Reply,
    backwards,
    cut,
    error_reply,
    events,
    json_reply,
    server_error,
    stream,
    token_flood,
    without_timings,
)
from tests.support.scripted_server import ScriptedServer
from tests.support.server_acts import connect, in_use, run, until
from tests.support.window_acts import enabled, messages, trigger

KEY = "secret-of-the-server"


def status_words(window: MainWindow) -> str:
    words = window.status.findChild(QWidget, "status.words")
    assert words is not None
    return words.accessibleName()


def disconnect(qtbot: QtBot, window: MainWindow) -> None:
    trigger(window, "file.disconnect")
    until(qtbot, lambda: not in_use(window))


def shown_text(window: MainWindow) -> str:
    return "".join(area.stream.text() for area in window.tokens.areas.values() if area.stream)


def n_rounds(window: MainWindow) -> int:
    run = window.feed.run
    assert run is not None
    return int((run.store.rounds.column("run_id") == run.run_id).sum())


def test_the_dialog_says_what_is_wrong_with_an_address(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    trigger(at_servers, "file.connect")
    dialog = at_servers.findChild(ConnectDialog)
    assert dialog is not None
    # fields are requested on behalf of clients, and removed from their replies
    assert "unchanged" not in dialog.watch.toolTip()
    dialog.address.setEditText("http://host:0/?x")
    dialog.accept()
    assert "is not the address of a server" in dialog.problem.text()
    dialog.address.setEditText(server.url)
    dialog.model.setText("m")
    qtbot.keyClick(dialog.address.lineEdit(), Qt.Key.Key_Return)
    until(qtbot, lambda: at_servers.bridge.server is not None)
    until(qtbot, lambda: at_servers.findChild(ConnectDialog) is None)
    trigger(at_servers, "file.connect")
    again = at_servers.findChild(ConnectDialog)
    assert again is not None
    assert (again.address.currentText(), again.model.text()) == (server.url, "")
    with qtbot.waitSignal(again.accepted):
        again.address.lineEdit().selectAll()  # as the focus does
        qtbot.keyClick(again.address.lineEdit(), Qt.Key.Key_Return)
    assert at_servers.settings.recent_servers == [server.url]
    assert server.url.removeprefix("http://") in at_servers.windowTitle()


def test_the_dialog_has_what_was_tried_last(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.touch()
    tried = ("", "", "", "", False)
    for _ in range(2):
        trigger(at_servers, "file.connect")
        dialog = at_servers.findChild(ConnectDialog)
        assert dialog is not None
        fields = dialog.address.lineEdit(), dialog.log, dialog.model, dialog.key
        assert (*(field.text() for field in fields), dialog.watch.isChecked()) == tried
        assert dialog.port.isEnabled() is dialog.watch.isChecked()
        tried = ("http://127.0.0.1:9", str(log), "large", "", True)
        for field, words in zip(fields, (*tried[:3], "secret"), strict=True):
            field.setText(words)
        dialog.watch.setChecked(True)
        dialog.accept()
        until(qtbot, lambda: bool(messages(at_servers)))
        until(qtbot, lambda: at_servers.findChild(ConnectDialog) is None)
    assert at_servers.settings.recent_servers == []


def test_the_dialog_names_a_model_of_a_router(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    models = [{"id": name, "owned_by": "llamacpp"} for name in ("small", "large")]
    router = {"role": "router", "models_autoload": True, "build_info": "b1-c"}
    for name in ("", "large"):
        server.script("/v1/models", json_reply({"data": models}))
        server.script("/props", json_reply(router))
        trigger(at_servers, "file.connect")
        dialog = at_servers.findChild(ConnectDialog)
        assert dialog is not None
        dialog.address.setEditText(server.url)
        dialog.model.setText(name)
        dialog.accept()
        if not name:
            until(qtbot, lambda: bool(messages(at_servers)))
            assert "has 2 models: small, large. Name one" in messages(at_servers)[0]
            until(qtbot, lambda: at_servers.findChild(ConnectDialog) is None)
    until(qtbot, lambda: at_servers.bridge.server is not None)
    assert server.of("/props")[-1].query == {"model": "large"}


def test_stop_ends_a_run_of_a_server_that_never_ends_its_reply(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    server.script("/completion", Raw(token_flood))
    at_servers.run_panel.prompt.setPlainText("def f(")
    trigger(at_servers, "run.start")
    until(qtbot, lambda: at_servers.bridge.has_run and n_rounds(at_servers) > 50)
    with qtbot.waitSignal(at_servers.bridge.run_ended):
        trigger(at_servers, "run.stop")
    until(qtbot, lambda: at_servers.bridge.state is State.READY)
    shown = at_servers.feed.run
    assert shown is not None and shown.facts["stops"] == ["stopped"]
    assert server.of("/completion")[0].left.wait(20) and not messages(at_servers)


def test_the_status_line_counts_how_long_the_server_lets_wait(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.observe.server.reply._SHOWN_AFTER_S", 0.0)
    trigger(at_servers, "file.connect")
    dialog = at_servers.findChild(ConnectDialog)
    assert dialog is not None and dialog.limit.value() == 600
    dialog.limit.setValue(77)
    dialog.address.setEditText(server.url)
    dialog.accept()
    until(qtbot, lambda: at_servers.bridge.server is not None)
    assert at_servers.settings.server_timeout == 77
    server.script("/completion", Raw(lambda: []))
    at_servers.run_panel.prompt.setPlainText("def f(")
    until(qtbot, at_servers.actions_by_id["run.start"].isEnabled)
    trigger(at_servers, "run.start")
    said = f"waiting for the headers of {server.url}/completion, 1 of 77 s · "
    until(qtbot, lambda: status_words(at_servers).startswith(said))
    trigger(at_servers, "run.stop")
    until(qtbot, lambda: "waiting" not in status_words(at_servers))


def test_stop_waits_for_no_chat_template(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    server.script("/apply-template", Raw(lambda: []))
    at_servers.bridge.ask(StartRun(["hi"], RunOptions(), chat={}))
    until(qtbot, lambda: bool(server.of("/apply-template")))
    trigger(at_servers, "run.stop")
    until(qtbot, lambda: at_servers.bridge.state is State.READY)
    assert server.of("/apply-template")[0].left.wait(20)
    assert not messages(at_servers) and not server.of("/completion")


def test_a_run_at_a_server_is_that_of_its_counters(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    facts = at_servers.model_map.server.facts
    assert facts["model"] == "demo-target.gguf" and "4,096 vocabulary" in facts["context"]
    assert not {"run.compare", "run.measure_fidelity", "run.pause", "run.step"} & enabled(
        at_servers
    )
    assert "does not report logits" in at_servers.actions_by_id["run.compare"].toolTip()
    run(qtbot, at_servers)
    assert "def" in shown_text(at_servers) or len(shown_text(at_servers)) > 100
    shown = at_servers.feed.run
    assert shown is not None
    rounds = shown.store.rounds
    drafted = rounds.column("num_draft_tokens")
    assert drafted[drafted != MISSING].sum() == 152, "as the capture's README says"
    assert at_servers.status.chips["acceptance"].text == f"{43 / 152:.3g}"
    counts = "51 drafts, 152 drafted, 43 accepted, 96 generated\nRecorded here: 152 drafted, 43 acc"
    until(qtbot, lambda: counts in at_servers.model_map.server.facts["counters"])
    assert server.of("/completion")[-1].json["prompt"] == "def quicksort(arr):"
    assert messages(at_servers) == []


def test_what_a_request_cannot_set_is_greyed_with_the_reason(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    panel = at_servers.run_panel
    panel.n_max.setValue(7)
    connect(qtbot, at_servers, server.url)
    for field in (panel.drafter, panel.n_max, panel.rollback, panel.memory["kv"]):
        assert not field.isEnabled()
        assert "server" in field.toolTip()
    assert panel.n_predict.isEnabled() and panel.sampling["temp"].isEnabled()
    panel.n_predict.setValue(21)
    panel.sampling["temp"].setValue(0.8)
    assert not panel.problem
    run(qtbot, at_servers)
    sent = server.of("/completion")[-1].json
    assert (sent["n_predict"], sent["temperature"]) == (21, 0.8)
    disconnect(qtbot, at_servers)
    assert panel.drafter.isEnabled() and panel.note.isHidden()
    assert panel.n_max.value() == 7
    until(qtbot, lambda: at_servers.bridge.state is State.EMPTY)
    assert at_servers.feed.run is not None, "recorded runs are kept"


def test_a_server_that_loads_is_waited_for_and_can_be_given_up(
    make_window: Callable[..., MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    with ScriptedServer("mtp", loading=10**6) as server:
        window = make_window(Bridge(engine, servers=ServerEngine(look_s=0.05)))
        window.control.connect_server(server.url)
        until(qtbot, lambda: "is loading its model" in window.status.phase.text())
        assert window.bridge.state is State.LOADING
        assert f"connecting to {server.url}" in window.status.texts["model"]
        window.status.cancel_asked.emit()
        until(qtbot, lambda: window.bridge.state is State.EMPTY)
        assert window.bridge.server is None and not window.status.progress_shown
        assert messages(window) == []


def test_a_server_that_has_loaded_is_used(at_servers: MainWindow, qtbot: QtBot) -> None:
    with ScriptedServer("mtp", loading=2) as server:
        connect(qtbot, at_servers, server.url)
        assert at_servers.bridge.server is not None
        disconnect(qtbot, at_servers)


def test_a_key_is_asked_for_and_then_kept_for_the_session(
    at_servers: MainWindow, qtbot: QtBot
) -> None:
    with ScriptedServer("mtp", key=KEY) as server:
        connect(qtbot, at_servers, server.url)
        assert at_servers.bridge.server is None
        (message,) = messages(at_servers)
        assert "does not accept the API key" in message
        connect(qtbot, at_servers, server.url, KEY)
        assert "no keyring" in "".join(messages(at_servers))
        assert "only for this session" in at_servers.model_map.server.facts["key"]
        disconnect(qtbot, at_servers)
        connect(qtbot, at_servers, server.url)
        run(qtbot, at_servers)
        facts = at_servers.feed.run
        assert facts is not None and KEY not in repr(facts.facts)
        assert KEY not in repr(at_servers.bridge.__dict__)
        disconnect(qtbot, at_servers)


def test_a_server_that_goes_has_a_red_chip_until_it_is_back(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    run(qtbot, at_servers)
    before = n_rounds(at_servers)
    plain = at_servers.tokens.end_card.plain
    until(qtbot, lambda: not plain.isHidden())
    server.kill()
    until(qtbot, lambda: not at_servers.status.gone.isHidden())
    assert plain.isHidden()
    assert "cannot be reached" in at_servers.status.gone.toolTip()
    assert "Start the server again" in messages(at_servers)[-1]
    assert len(messages(at_servers)) == 1
    assert " · not responding" in at_servers.status.texts["model"]
    assert n_rounds(at_servers) == before
    server.restart()
    until(qtbot, lambda: at_servers.status.gone.isHidden())
    assert not messages(at_servers)
    run(qtbot, at_servers)
    assert n_rounds(at_servers) == before
    server.kill()
    until(qtbot, lambda: not at_servers.status.gone.isHidden())
    server.capture = {**server.capture, "props": {**server.capture["props"], "total_slots": 9}}
    server.restart()
    until(qtbot, lambda: "another model" in at_servers.status.gone.toolTip())
    assert "Connect to it again" in "".join(messages(at_servers))


def test_stop_ends_the_request_at_the_server_and_keeps_what_arrived(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    pieces, hold = stream(server.capture["requests"][0]), Hold()
    server.script("/completion", Reply([*pieces[:30], hold, *pieces[30:]]))
    connect(qtbot, at_servers, server.url)
    at_servers.run_panel.prompt.setPlainText("a")
    trigger(at_servers, "run.start")
    until(qtbot, lambda: hold.reached.is_set() and at_servers.feed.run is not None)
    until(qtbot, lambda: n_rounds(at_servers) > 3)
    with qtbot.waitSignal(at_servers.bridge.run_ended):
        trigger(at_servers, "run.stop")
    until(qtbot, lambda: server.of("/completion")[-1].left.is_set())
    hold.release()
    assert n_rounds(at_servers) > 3
    assert messages(at_servers) == []


ANSWERS: dict[str, tuple[Callable[[list[bytes]], Reply], int, str]] = {
    "cut": (lambda p: Reply(cut(p, 40)), 5, "before the answer was complete"),
    "error inside": (lambda p: Reply(server_error(p, 40, "out of memory")), 5, "out of memory"),
    "html": (lambda p: WEB_PAGE, 0, "llama-server does not send"),
    "500": (lambda p: error_reply(500, "it broke"), 0, "it broke"),
    "too long": (
        lambda p: error_reply(
            400, "too long", "exceed_context_size_error", n_prompt_tokens=9000, n_ctx=1024
        ),
        0,
        "9000 tokens",
    ),
    "no timings": (lambda p: Reply(without_timings(p)), 0, ""),
    "backwards": (lambda p: Reply(backwards(p, 40)), 5, ""),
    "not utf-8": (lambda p: Reply([*p[:20], b"data: \xff\xfe\n\n", *p[20:]]), 5, ""),
    "10 MB": (lambda p: Reply([*events({"content": "x" * 10_000_000}), *p]), 0, ""),
}
"""Replies made of the capture's; how many rounds are recorded at least, and what is said."""


def test_whatever_a_server_answers_the_window_lives(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    for name, (reply, least, said) in ANSWERS.items():
        before = at_servers.feed.run
        server.script("/completion", reply(stream(server.capture["requests"][0])))
        run(qtbot, at_servers)
        assert at_servers.feed.run != before and n_rounds(at_servers) >= least, name
        shown = messages(at_servers)
        assert len(shown) <= 1, name
        assert said in "".join(shown), name
        run(qtbot, at_servers)
        drafted = at_servers.status.chips["acceptance"].text
        assert drafted == f"{43 / 152:.3g}", f"after {name} all is as if nothing had been"
        at_servers.banners.clear()


def test_two_servers_runs_lie_over_each_other(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    connect(qtbot, at_servers, server.url)
    run(qtbot, at_servers)
    first = at_servers.feed.run
    with ScriptedServer("draft") as other:
        connect(qtbot, at_servers, other.url)
        until(qtbot, lambda: len(at_servers.bridge.recorded) == 2)
        run(qtbot, at_servers)
        second = at_servers.feed.run
        assert first is not None and second is not None and first.store is not second.store
        assert at_servers.runs.model.line_of(first) is not None
        at_servers.feed.set_overlay(first)
        assert at_servers.status.overlay.text == f"run 0 of {server.url.removeprefix('http://')}"
        at_servers.docks.reveal("runs")
        at_servers.runs.pair.refresh()
        figures = {p.label: p.values for p in at_servers.runs.pair.model.rows}
        assert figures["restores"] == (20, 0)
        disconnect(qtbot, at_servers)


def test_other_programs_are_watched(
    at_servers: MainWindow, server: ScriptedServer, qtbot: QtBot
) -> None:
    at_servers.control.connect_server(server.url, port=free_port())
    until(qtbot, lambda: at_servers.bridge.state is State.RUNNING)
    until(qtbot, lambda: at_servers.feed.run is not None)
    shown = at_servers.feed.run
    assert shown is not None
    done: list[int] = []

    def ask() -> None:
        body = {"prompt": "a", "stream": True}
        reply = httpx.post(f"{shown.facts['listens_at']}/completion", json=body, trust_env=False)
        done.append(reply.status_code)

    client = threading.Thread(target=ask)
    client.start()
    until(qtbot, lambda: bool(done) and n_rounds(at_servers) > 40)
    client.join()
    assert str(shown.facts["listens_at"]) in "".join(messages(at_servers))
    with qtbot.waitSignal(at_servers.bridge.run_ended):
        trigger(at_servers, "run.stop")
    until(qtbot, lambda: at_servers.bridge.state is State.READY)
    assert messages(at_servers) == [], "nothing is recorded any more"
    assert done == [200]
    assert at_servers.status.chips["acceptance"].text == f"{43 / 152:.3g}"
