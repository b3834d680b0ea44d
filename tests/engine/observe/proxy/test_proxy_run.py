"""What passes the proxy becomes a run of the trace, for any client and however it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.analysis.findings.check import recorded
from engine.errors import DraftscopeError, OptionError
from engine.observe.proxy.exchange_queue import FELL_BEHIND
from engine.observe.proxy.proxy_run import ProxyRun
from engine.observe.rounds.observed_run import ServerFacts
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.support.scripted_replies import Hold, Reply, cut, json_reply, stream
from tests.support.scripted_server import ScriptedServer

NDJSON = {"Content-Type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as started:
        yield started


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.received.clear()
    return running


@pytest.fixture
def run(server: ScriptedServer) -> Iterator[ProxyRun]:
    facts = ServerFacts(server.url, props=server.capture["props"])
    made = ProxyRun(facts, TraceStore())
    yield made
    made.stop()


def until(run: ProxyRun, holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        assert run.advance()
    raise AssertionError("it never came true")


def ask(run: ProxyRun, body: dict[str, Any], path: str = "/completion") -> httpx.Response:
    return httpx.post(f"{run.url}{path}", json=body, timeout=60, trust_env=False, verify=False)


def unasked(request: dict[str, Any]) -> dict[str, Any]:
    """The captured request as one sends it who does not know of timings per token."""
    return {k: v for k, v in request["body"].items() if k != "timings_per_token"}


def test_requests_of_others_are_sequences_of_one_run(server: ScriptedServer, run: ProxyRun) -> None:
    """Sums as the captures' README gives them: 43 of 152 and 46 of 142 drafted tokens."""
    for request in server.capture["requests"][:2]:
        ask(run, unasked(request))
    until(run, lambda: len(run.requests) == 2 and not run._open)
    run.stop()
    facts = run.trace.runs[run.run_id]
    assert facts["attachment"] == "proxy" and facts["listens_at"] == run.url
    for seq_id, sums in enumerate([(96, 152, 43), (96, 142, 46)]):
        told = summary(run.trace, run.run_id, seq_id)
        assert (told["predicted_n"], told["draft_n"], told["draft_n_accepted"]) == sums
    assert [request["complete"] for request in facts["requests"]] == [True, True]
    assert all("timings_per_token" in one.json for one in server.received)


def test_the_log_of_the_server_tells_what_its_replies_withhold(
    server: ScriptedServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("")
    run = ProxyRun(ServerFacts(server.url), TraceStore(), log=log)
    ask(run, unasked(server.capture["requests"][0]))
    log.write_text("".join(f"{line}\n" for line in server.capture["log"]))
    until(run, lambda: len(run.requests) == 1 and not run._open)
    run.stop()
    rounds = run.trace.rounds
    drafted = rounds.column("num_draft_tokens") > 0
    assert drafted.sum() == 51 and (rounds.column("verify_ms")[drafted] > 0).all()
    assert set(np.array(rounds.texts("drafter"))[drafted]) == {"draft-mtp"}
    assert not run.unread_log


def test_a_request_without_a_stream_gives_sums_only(server: ScriptedServer, run: ProxyRun) -> None:
    reply = ask(run, unasked(server.capture["requests"][2]))
    until(run, lambda: len(run.requests) == 1 and not run._open)
    run.stop()
    assert len(run.trace.rounds) == 0
    for told in (summary(run.trace, run.run_id), summary(run.trace, run.run_id, 0)):
        for name in ("predicted_n", "draft_n", "draft_n_accepted"):
            assert told[name] == reply.json()["timings"][name] > 0


def test_a_server_that_breaks_off_and_one_that_is_gone_are_findings(
    server: ScriptedServer, run: ProxyRun
) -> None:
    request = server.capture["requests"][0]
    server.script("/completion", Reply(cut(stream(request), 30)))
    with pytest.raises(httpx.RemoteProtocolError):
        ask(run, unasked(request))
    server.kill()
    assert ask(run, unasked(request)).status_code == 502
    server.restart()
    until(run, lambda: len(run.requests) == 2 and not run._open)
    assert len(run.trace.rounds) > 5
    run.stop()
    assert [one.message for one in recorded(run.trace) if one.rule == "stream-cut"] == [
        f"{server.url} broke off its reply.",
        f"{server.url} cannot be reached: connection refused.",
    ]


def test_a_request_is_cancelled_by_its_sequence(server: ScriptedServer, run: ProxyRun) -> None:
    request, hold = server.capture["requests"][0], Hold()
    pieces = stream(request)
    server.script("/completion", Reply([*pieces[:40], hold, *pieces[40:]]))
    ended: list[Any] = []

    def wait() -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(run, unasked(request))
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    until(run, lambda: len(run.trace.rounds) > 5)
    run.cancel(run.requests[0].seq_ids[0])
    until(run, lambda: not run._open)
    thread.join(60)
    assert ended and server.received[0].left.wait(60)
    hold.release()
    with pytest.raises(OptionError, match="Sequence 0 has ended"):
        run.cancel(0)
    ask(run, unasked(request))  # the others go on
    until(run, lambda: len(run.requests) == 2 and not run._open)


def test_a_stop_keeps_what_came(server: ScriptedServer, run: ProxyRun) -> None:
    request, hold = server.capture["requests"][0], Hold()
    pieces = stream(request)
    server.script("/completion", Reply([*pieces[:40], hold, *pieces[40:]]))

    def wait() -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(run, unasked(request))

    thread = threading.Thread(target=wait)
    thread.start()
    until(run, lambda: len(run.trace.rounds) > 5)
    run.stop()
    run.stop()
    thread.join(60)
    hold.release()
    assert not run.advance() and not run.step() and run.done
    assert run.trace.runs[run.run_id]["stops"] == ["stopped"]
    with pytest.raises(httpx.ConnectError):
        ask(run, {})


def test_what_comes_too_fast_passes_and_is_a_finding(
    server: ScriptedServer, run: ProxyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run._queue._inbox, "_limit", 30_000)
    request = server.capture["requests"][0]
    replies = [ask(run, unasked(request)).content for _ in range(4)]  # the queue is not read
    assert [reply.count(b"tokens_predicted") for reply in replies] == [97] * 4
    run.stop()
    found = [one for one in recorded(run.trace) if one.rule == "not-recorded"]
    assert [one.message for one in found] == [
        FELL_BEHIND,
        "3 requests arrived faster than they could be recorded.",
    ]
    assert summary(run.trace, run.run_id)["predicted_n"] > 10


def test_nothing_is_on_the_trace_but_what_was_generated(
    server: ScriptedServer, run: ProxyRun
) -> None:
    reply = json_reply({"content": "x"})
    reply.headers["Set-Cookie"] = "s=secret"
    server.script("/completion", reply)
    headers = {"Authorization": "Bearer secret", "X-Api-Key": "secret", "Cookie": "secret"}
    url = f"{run.url}/completion?key=secret"
    httpx.post(url, json={"prompt": "a"}, headers=headers, trust_env=False)
    httpx.get(f"{run.url}/health", headers=headers, trust_env=False)
    until(run, lambda: len(run.requests) == 1 and not run._open)
    run.stop()
    assert len(run.requests) == 1
    assert "secret" not in repr(run.trace.runs)
    assert "secret" not in repr(run.requests[0].known)


def test_a_proxy_that_fails_ends_the_run(
    server: ScriptedServer, run: ProxyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run._proxy.stop()
    run._proxy.error = RuntimeError("out of sockets")
    with pytest.raises(DraftscopeError, match="failed: out of sockets"):
        run.advance()
    assert run.done and not run.advance()
    assert "out of sockets" in run.trace.runs[run.run_id]["error"]


def test_an_address_that_is_taken_leaves_no_run(server: ScriptedServer) -> None:
    trace = TraceStore()
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OptionError):
        ProxyRun(ServerFacts(server.url), trace, port=port)
    assert trace.runs == {}


def test_what_passes_to_other_engines_passes_unchanged(server: ScriptedServer) -> None:
    """Ids of vLLM, lines of ollama; nothing is asked for on behalf of a client."""
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [7, 8]}
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    whole = {"id": "c", "choices": [{**choice, "prompt_token_ids": [1, 2]}], "usage": usage}
    line = {"model": "m", "response": "x", "done": False}
    last = {"model": "m", "response": "", "done": True, "eval_count": 1, "prompt_eval_count": 2}
    body = b"".join(json.dumps(one).encode() + b"\n" for one in (line, last))
    server.script("/v1/completions", json_reply(whole))
    server.script("/api/generate", Reply([body[:20], body[20:]], 200, NDJSON))
    run = ProxyRun(ServerFacts(server.url, "vllm"), TraceStore())
    try:
        asked = {"model": "m", "prompt": "x", "stream": True}
        assert ask(run, asked, "/v1/completions").json() == whole
        assert ask(run, asked, "/api/generate").content == body
        until(run, lambda: len(run.requests) == 2 and not run._open)
    finally:
        run.stop()
    assert [one.json for one in server.received] == [asked, asked]
    assert [one["told"]["predicted_n"] for one in run.trace.runs[0]["requests"]] == [2, 1]
    table = run.trace.tokens
    assert table.column("token_id").tolist()[:4] == [1, 2, 7, 8]
    assert table.texts("text")[4:] == ["x"]
    assert run.trace.runs[0]["model"] == {"name": "m", "meta": {}}
    assert not recorded(run.trace) and not len(run.trace.rounds)


def test_in_front_of_a_router_each_request_names_its_model(server: ScriptedServer) -> None:
    run = ProxyRun(ServerFacts(server.url, props={"role": "router"}), TraceStore())
    try:
        for name, request in zip("ab", server.capture["requests"][:2], strict=True):
            ask(run, unasked(request) | {"model": name})
        until(run, lambda: len(run.requests) == 2 and not run._open)
    finally:
        run.stop()
    facts = run.trace.runs[0]
    assert [one["model"] for one in facts["requests"]] == ["a", "b"]
    assert facts["model"]["name"] == "a, b"
    assert summary(run.trace, 0)["draft_n"] == 152 + 142
