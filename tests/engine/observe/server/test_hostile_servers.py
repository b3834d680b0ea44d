"""Servers that never come to an end: Stop ends the run, limits of time and size end the request."""

from __future__ import annotations

import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import Cancelled, ServerError, ServerTimeoutError
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.server import reply as reply_module
from engine.observe.server import server_run
from engine.observe.server.client import ServerClient
from engine.observe.server.reply import Inbox, TimeLimits
from engine.observe.server.request_options import ServerRequest
from engine.observe.server.server_run import ServerRun
from engine.trace.store import TraceStore
from tests.support.scripted_replies import (
    EVENTS,
    JSON,
    OK,
    Hold,
    Raw,
    Reply,
    dripped,
    endless,
    error_reply,
    stream,
    token_events,
    token_flood,
)
from tests.support.scripted_server import ScriptedServer

SHORT = TimeLimits(connect_timeout=5.0, timeout=0.3)
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FEW = b"".join(token_events(40))
HUGE = b'data: {"content": "' + b"x" * (1 << 20) + b'"}\n\n'
BIG_CHUNK = b"1;" + b"x" * 1000 + b"\r\n:\r\n"


Script = Callable[[], Raw]

ENDLESS: dict[str, Script] = {
    "flood": lambda: Raw(token_flood),
    "huge events": lambda: endless(HUGE, EVENTS),
    "silent": lambda: Raw(lambda: []),
    "silent after its events": lambda: Raw(lambda: [EVENTS + FEW]),
    "dripped headers": lambda: dripped(b"X-A: b\r\n", OK),
    "dripped body": lambda: dripped(b"data: x", EVENTS + FEW),
    "dripped 100": lambda: dripped(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "pings": lambda: endless(b": ping\n\n", EVENTS + FEW),
    "chunk extensions": lambda: endless(BIG_CHUNK, CHUNKED),
    "dripped chunk header": lambda: dripped(b"1", CHUNKED + b"0"),
    "dripped trailers": lambda: dripped(b"X-A: b\r\n", CHUNKED + b"0\r\n"),
    "dripped error": lambda: dripped(b"x", b"HTTP/1.1 500 no\r\n\r\n"),
}
"""Replies to /completion that do not end by themselves."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("mtp") as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[ServerClient]:
    with ServerClient(server.url) as client:
        yield client


def request_for(prompt: str = "x") -> ServerRequest:
    return ServerRequest("/completion", {"prompt": prompt, "stream": True}, prompt)


def begin(client: ServerClient, n: int = 1, **more: Any) -> ServerRun:
    return ServerRun(
        client, ServerFacts(client.address), [request_for()] * n, TraceStore(), parallel=n, **more
    )


def finish(run: ServerRun) -> ServerError | None:
    try:
        while run.advance():
            pass
    except ServerError as error:
        return error
    return None


def n_emitted(run: ServerRun) -> int:
    column = run.trace.rounds.column("num_emitted", 0, len(run.trace.rounds))
    return int(column[column > 0].sum())


def advance_until(run: ServerRun, holds: Callable[[], bool]) -> None:
    while not holds():
        assert run.advance()


@pytest.mark.parametrize("name", ENDLESS)
def test_stop_ends_a_run_whatever_the_server_sends(
    server: ScriptedServer, client: ServerClient, name: str
) -> None:
    server.script("/completion", ENDLESS[name]())
    run = begin(client)
    advance_until(run, lambda: bool(server.of("/completion")))
    has_events = name in ("flood", "silent after its events", "dripped body", "pings")
    advance_until(run, lambda: n_emitted(run) >= 20 or not has_events)
    run.stop()
    assert run.done and not run.errors
    # a flood of equal rounds may have a shape of acceptance
    assert not [found for found in recorded(run.trace) if not found.rule.startswith("acceptance-")]
    assert run.trace.runs[run.run_id]["stops"] == ["stopped"]
    assert server.of("/completion")[0].left.wait(20), "the server was left"


def test_stop_ends_all_of_several_sequences(server: ScriptedServer, client: ServerClient) -> None:
    names = ("flood", "dripped headers", "pings", "chunk extensions")
    server.script("/completion", *[ENDLESS[name]() for name in names])
    run = begin(client, 4)
    advance_until(run, lambda: len(server.of("/completion")) == 4 and n_emitted(run) > 400)
    run.stop()
    assert run.done and run.trace.runs[run.run_id]["stops"] == ["stopped"] * 4
    assert all(one.left.wait(20) for one in server.of("/completion"))


def test_stop_records_what_has_arrived_and_no_more(
    server: ScriptedServer, client: ServerClient
) -> None:
    server.script("/completion", ENDLESS["flood"]())
    run = begin(client)
    advance_until(run, lambda: n_emitted(run) > 0)
    while not run._inbox.is_full:
        pass
    n_waiting, taken = run._inbox.n_waiting, list[Any]()
    take = run._inbox.take

    def counted(seconds: float) -> Any:
        taken.append(take(seconds))
        return taken[-1]

    run._inbox.take = counted  # type: ignore[method-assign]
    run.stop()
    n_bytes = sum(len(one.data) for one in taken if one is not None)
    assert n_waiting <= len(taken) and n_bytes < 16 << 20
    assert run.trace.runs[run.run_id]["stops"] == ["stopped"]


@pytest.mark.parametrize("where", ["before", "slots", "behind"])
@pytest.mark.parametrize("how", ["silent", "dripped", "endless"])
def test_stop_waits_for_no_answer_besides(
    server: ScriptedServer, client: ServerClient, where: str, how: str
) -> None:
    head = OK + b"Content-Type: text/plain\r\n\r\n"
    reply = {
        "silent": Raw(lambda: []),
        "dripped": dripped(b"llamacpp:a 1\n", head),
        "endless": endless(b"llamacpp:a 1\n" * 100, head),
    }[how]
    path = "/slots" if where == "slots" else "/metrics"
    server.script("/completion", Raw(lambda: [EVENTS + FEW]) if where == "slots" else Reply(FEW))
    if where == "behind":
        server.script(path, Reply(b"llamacpp:a 1\n"))
    server.script(path, reply)
    n_asked = 2 if where == "behind" else 1
    run = begin(client)
    try:
        while len(server.of(path)) < n_asked:
            assert run.advance()
    except ServerError:  # the reply was not complete
        assert where == "behind"
    run.stop()
    assert run.done
    client.close()
    assert server.of(path)[-1].left.wait(20)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("silent", "the headers of"),
        ("dripped headers", "the headers of"),
        ("dripped 100", "the headers of"),
        ("silent after its events", "the next event of"),
        ("dripped body", "the next event of"),
        ("pings", "the next event of"),
        ("chunk extensions", "the first event of"),
        ("dripped chunk header", "the first event of"),
        ("dripped trailers", "the first event of"),
    ],
)
def test_a_limit_of_time_ends_a_request(server: ScriptedServer, name: str, what: str) -> None:
    server.script("/completion", ENDLESS[name]())
    with ServerClient(server.url, limits=SHORT) as client:
        run = begin(client)
        error = finish(run)
        assert isinstance(error, ServerTimeoutError) and what in error.message
        assert server.url in error.message and "--timeout" in error.remedy
        assert "0.3 s" in error.message and run.trace.runs[run.run_id]["error"] == error.message
        assert server.of("/completion")[0].left.wait(20)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *zip(
            ("/props", "/v1/models", "/slots", "/metrics", "/health"),
            cycle(("silent", "dripped", "dripped head")),
        ),
        ("/props", "dripped head"),
    ],
)
def test_a_short_reply_has_a_limit_as_a_whole(server: ScriptedServer, path: str, name: str) -> None:
    reply = {
        "silent": Raw(lambda: []),
        "dripped": dripped(b" ", OK + b"Content-Type: application/json\r\n\r\n"),
        "dripped head": dripped(b"X-A: b\r\n", OK),
    }[name]
    server.script(path, reply)
    with ServerClient(server.url, limits=TimeLimits(connect_timeout=0.5)) as client:
        asked = {"/slots": client.slots, "/metrics": client.metrics}.get(path, client.facts)
        with pytest.raises(ServerTimeoutError, match=rf"{path} took more than 0\.5 s") as raised:
            asked()
    assert "--connect-timeout" in raised.value.remedy


def test_a_server_that_never_accepts_is_a_connection_that_never_comes() -> None:
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    address = full.getsockname()
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(address)
    with ServerClient(f"127.0.0.1:{address[1]}", limits=TimeLimits(connect_timeout=0.3)) as client:
        with pytest.raises(ServerError, match=r"a connection to .* took more than 0\.3 s"):
            client.facts()
        error = finish(begin(client))
        assert error is not None and "a connection to" in error.message
    for one in (*waiting, full):
        one.close()


def test_a_model_that_is_loaded_for_ever_has_a_limit() -> None:
    with (
        ScriptedServer("mtp", loading=10**9) as server,
        ServerClient(server.url, limits=SHORT) as client,
    ):
        with pytest.raises(ServerTimeoutError, match="to load its model took more than"):
            client.facts()
        server.loading = 0
        server.script("/completion", *[error_reply(503, "Loading model", "unavailable_error")] * 99)
        error = finish(begin(client))
        assert isinstance(error, ServerTimeoutError) and "to load its model" in error.message


@pytest.mark.parametrize(
    "reply",
    [
        endless(b"X-A: " + b"b" * 1000 + b"\r\n", OK),
        endless(b"X-A:b\r\n" * 200, OK),
        endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
        endless(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 40),
    ],
    ids=["long headers", "many headers", "100", "103"],
)
@pytest.mark.parametrize("path", ["/completion", "/props"])
def test_endless_headers_are_given_up(
    server: ScriptedServer, client: ServerClient, path: str, reply: Raw
) -> None:
    server.script(path, reply)
    error: ServerError | None = None
    if path == "/props":
        with pytest.raises(ServerError) as raised:
            client.facts()
        error = raised.value
    else:
        error = finish(begin(client))
    assert error is not None and "interim responses" in error.message and path in error.message
    assert server.of(path)[0].left.wait(20) and server.of(path)[0].n_sent < 32 << 20


@pytest.mark.parametrize(
    ("path", "encoding"),
    [
        *(("/completion", one) for one in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "X")),
        ("/props", "gzip"),
        ("/metrics", "gzip, deflate, br"),
    ],
)
def test_an_encoding_that_was_not_asked_for_is_refused(
    server: ScriptedServer,
    client: ServerClient,
    path: str,
    encoding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decompressed(*_: Any) -> None:
        raise AssertionError("a server's reply is decompressed")

    bomb = zlib.compress(b"\0" * (1 << 24), 9)
    monkeypatch.setattr(zlib, "decompressobj", decompressed)
    kind = "text/event-stream" if path == "/completion" else JSON["Content-Type"]
    headers = {"Content-Type": kind, "Content-Encoding": encoding}
    server.script(path, Reply(bomb, 200, headers))
    error: ServerError | None = None
    if path == "/completion":
        error = finish(begin(client))
    else:
        with pytest.raises(ServerError) as raised:
            client.facts() if path == "/props" else client.metrics()
        error = raised.value
    assert error is not None and f"the encoding {encoding.lower()}, which was not" in error.message
    assert "Switch compression off" in error.remedy
    assert server.of(path)[0].headers["accept-encoding"] == "identity"


def test_identity_is_no_encoding(server: ScriptedServer, client: ServerClient) -> None:
    headers = {"Content-Type": "text/event-stream", "Content-Encoding": "Identity"}
    server.script("/completion", Reply(stream(server.capture["requests"][0]), 200, headers))
    run = begin(client)
    assert finish(run) is None and n_emitted(run) == 96


@pytest.mark.parametrize("rest", [b"", b": ping\n\n"])
def test_a_connection_that_stays_open_behind_the_last_event_is_closed(
    server: ScriptedServer, client: ServerClient, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(server_run, "_END_S", 0.3)
    whole = EVENTS + b"".join(stream(server.capture["requests"][0]))
    server.script("/completion", endless(rest, whole) if rest else Raw(lambda: [whole]))
    run = begin(client)
    assert finish(run) is None and n_emitted(run) == 96 and not recorded(run.trace)
    assert run.trace.runs[run.run_id]["requests"][0]["complete"] is True
    assert server.of("/completion")[0].left.wait(20)


def test_a_full_inbox_lets_the_server_wait(server: ScriptedServer, client: ServerClient) -> None:
    server.script("/completion", ENDLESS["flood"]())
    inbox, most = Inbox(), 0
    sent = client.stream(0, "/completion", b"{}", inbox)
    while not inbox.is_full:
        pass
    for _ in range(20):
        most = max(most, inbox._waiting)
        client.metrics()  # the client's thread goes on
    assert most < 2 << 20
    sent()
    assert server.of("/completion")[0].left.wait(20)


def test_no_event_is_lost_however_fast_they_come(
    server: ScriptedServer, client: ServerClient
) -> None:
    """One chunk for each event, all of them at once."""
    pieces = token_events(6000)
    last = json.loads(pieces[-1].removeprefix(b"data: ")) | {"stop": True, "content": ""}
    pieces.append(b"data: " + json.dumps(last).encode() + b"\n\n")
    body = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"
    server.script("/completion", Raw(lambda: [CHUNKED + body]))
    run, n_looks = begin(client), 0
    while run.advance():
        n_looks += 1
    assert n_emitted(run) == 6000 and len(run.first_texts) == 6000
    assert n_looks < 2000, "what shows the run looks at it less often than events come"


def test_what_one_read_brings_is_one_arrival(server: ScriptedServer, client: ServerClient) -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in token_events(2000))
    server.script("/completion", Raw(lambda: [CHUNKED + chunks]))
    inbox, n_events, n_arrivals = Inbox(), 0, 0
    sent = client.stream(0, "/completion", b"{}", inbox)
    while n_events < 2000:
        arrival = inbox.take(20)
        assert arrival is not None
        n_events += arrival.data.count(b"\n\n")
        n_arrivals += 1
    assert n_arrivals < 500
    sent()


def test_a_run_that_nobody_advances_waits_for_nothing(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, clock = [0.0], reply_module.perf_counter
    for module in (reply_module, server_run):
        monkeypatch.setattr(module, "perf_counter", lambda: clock() + late[0])
    held, said = Hold(), list[str]()
    whole = stream(server.capture["requests"][0])
    server.script("/completion", Reply([*whole[:40], held, *whole[40:]]))
    with ServerClient(server.url, limits=TimeLimits(timeout=600)) as client:
        run = begin(client, report=said.append)
        advance_until(run, lambda: n_emitted(run) >= 20)
        late[0] += 10_000  # paused
        run.advance()
        assert not run.errors and not any(said)
        take = run._inbox.take

        def slow(seconds: float) -> Any:
            arrival = take(seconds)
            late[0] += 0.0 if arrival else 100.0
            return arrival

        run._inbox.take = slow  # type: ignore[method-assign]
        advance_until(run, lambda: any(said))
        assert f"waiting for the next event of {server.url}, " in "".join(said)
        assert said[-1].endswith(" of 600 s")
        run._inbox.take = take  # type: ignore[method-assign]
        held.release()
        assert finish(run) is None and said[-1] == ""


def test_a_name_that_is_looked_up_for_ever_keeps_nothing_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def blocked(*_: Any, **__: Any) -> Any:
        asked.set()
        go_on.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setenv("no_proxy", "*")
    cancelled = threading.Event()
    others = set(threading.enumerate())
    client = ServerClient("http://no-such-host.invalid:1")
    waiting = threading.Thread(target=lambda: asked.wait(60) and cancelled.set())
    waiting.start()
    with pytest.raises(Cancelled):
        client.facts(cancelled=cancelled)
    client.close()
    for thread in threading.enumerate():
        if thread.name == "server client" and thread not in others:
            thread.join(60)
    new = set(threading.enumerate()) - others
    left = [one for one in new if one.name in ("server client", "host name")]
    assert [one.name for one in left] == ["host name"] and left[0].daemon
    go_on.set()
    left[0].join(20)
    waiting.join()


def test_a_time_limit_that_is_none_is_refused() -> None:
    for value in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(Exception, match="--timeout is outside"):
            TimeLimits(timeout=value)
