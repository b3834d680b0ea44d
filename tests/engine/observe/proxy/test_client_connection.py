"""Clients that speak HTTP badly, slowly or halfway: each is answered, no other one notices."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.analysis.findings.check import recorded
from engine.errors import OptionError
from engine.observe.proxy import client_connection, request_checks
from engine.observe.proxy import proxy as proxy_module
from engine.observe.proxy.added_fields import add_fields
from engine.observe.proxy.exchange_queue import ExchangeQueue
from engine.observe.proxy.proxy import Proxy
from engine.observe.proxy.proxy_run import ProxyRun
from engine.observe.rounds.observed_run import ServerFacts
from engine.trace.store import TraceStore
from tests.support.scripted_replies import Hold, Reply, events, json_reply
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.filterwarnings("error")
EMPTY: dict[str, Any] = {"requests": [], "props": {}, "models": {}, "slots": [], "extra": {}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(EMPTY) as started:
        yield started


@pytest.fixture
def queue() -> ExchangeQueue:
    return ExchangeQueue()


@pytest.fixture
def proxy(
    server: ScriptedServer, queue: ExchangeQueue, capfd: pytest.CaptureFixture[str], caplog: Any
) -> Iterator[Proxy]:
    """A proxy that must print nothing and log no failure."""
    made = Proxy(server.url, queue)
    made.start()
    yield made
    made.stop()
    assert capfd.readouterr() == ("", "")
    assert [one for one in caplog.records if one.exc_info] == []


class Raw:
    """A client that sends bytes as they are."""

    def __init__(self, proxy: Proxy) -> None:
        self.port = int(proxy.url.rpartition(":")[2])
        self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, data: bytes) -> Raw:
        self.socket.sendall(data)
        return self

    def rest(self) -> bytes:
        """All that comes until the connection is closed."""
        got = b""
        with suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                got += piece
        self.socket.close()
        return got


def head(*lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    first = f"{method} /completion HTTP/{version}"
    return "\r\n".join((first, *lines, "", "")).encode("latin-1")


def message(reply: bytes) -> str:
    return str(json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"])


HOST = "Host: localhost"
REFUSED: dict[str, bytes] = {
    "length and chunks": head(HOST, "Content-Length: 2", "Transfer-Encoding: chunked")
    + b"2\r\n{}\r\n0\r\n\r\n",
    "chunks and length": head(HOST, "Transfer-Encoding: chunked", "Content-Length: 2") + b"{}",
    "two lengths": head(HOST, "Content-Length: 2", "Content-Length: 3") + b"{}",
    "a length twice": head(HOST, "Content-Length: 2", "Content-Length: 2") + b"{}",
    "a list of lengths": head(HOST, "Content-Length: 2, 3") + b"{}",
    "a negative length": head(HOST, "Content-Length: -1"),
    "a length with a sign": head(HOST, "Content-Length: +5") + b"12345",
    "an empty length": head(HOST, "Content-Length: "),
    "a huge length": head(HOST, "Content-Length: " + "9" * 30),
    "another encoding": head(HOST, "Transfer-Encoding: gzip"),
    "stacked encodings": head(HOST, "Transfer-Encoding: gzip, chunked"),
    "encodings twice": head(HOST, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "chunks in HTTP/1.0": head(HOST, "Transfer-Encoding: chunked", version="1.0"),
    "a folded header": head(HOST, "X-A: b", " c"),
    "a name with a space": head(HOST, "X-A : b"),
    "a null byte": head(HOST, "X-A: b\x00c"),
    "a null byte in the target": head(HOST).replace(b"/completion", b"/comp\x00"),
    "no host": head("X-A: b"),
    "two hosts": head(HOST, HOST),
    "a malformed host": head("Host: a b", "Connection: close"),
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "an empty line": b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "a chunk's size": head(HOST, "Transfer-Encoding: chunked") + b"zz\r\n",
    "a negative chunk": head(HOST, "Transfer-Encoding: chunked") + b"-1\r\n",
    "a huge chunk": head(HOST, "Transfer-Encoding: chunked") + b"f" * 30 + b"\r\n",
    "a chunk that is too long": head(HOST, "Transfer-Encoding: chunked") + b"1\r\n{}\r\n0\r\n\r\n",
}


def test_what_is_no_clear_request_is_a_400(server: ScriptedServer, proxy: Proxy) -> None:
    """One proxy for all of them, as starting and stopping one takes longer than any."""
    for name, request in REFUSED.items():
        reply = Raw(proxy).send(request).rest()
        assert reply.startswith(b"HTTP/1.1 400 "), name
        assert message(reply), name
        assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 200, name
        assert [one.path for one in server.received] == ["/health"], name
        server.received.clear()


@pytest.mark.parametrize(
    "request_head",
    [
        head(HOST, *(f"X-{i}: y" for i in range(300))),
        head(HOST, "X-A: " + "y" * 100_000),
        b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-A: " + b"y" * 100_000,
    ],
)
def test_a_head_that_is_too_long_is_a_431(proxy: Proxy, request_head: bytes) -> None:
    reply = Raw(proxy).send(request_head).rest()
    assert reply.startswith(b"HTTP/1.1 431 ") and "64 KiB" in message(reply)


def test_a_broken_body_after_the_reply_has_begun(server: ScriptedServer, proxy: Proxy) -> None:
    """The server may answer before it has read a request; then there is no place for a 400."""
    hold = Hold()
    server.script("/embedding", Reply([b"first", hold]))
    client = Raw(proxy).send(
        b"POST /embedding HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    client.send(b"1\r\n{\r\nzz\r\n")
    assert client.rest().count(b"HTTP/1.1") <= 1
    hold.release()
    assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 200


HOSTS = [
    ("/health", "localhost:{port}", 200),
    ("/health", "evil.example:{port}", 421),
    ("/health", "localhost:1", 421),
    ("http://localhost:{port}/health?a=b", "localhost", 200),
    ("HTTP://127.0.0.1:{port}/health", "localhost", 200),
    ("http://evil.example/health", "localhost", 421),
    ("http://localhost/health", "evil.example", 421),
    ("http://a@localhost/health", "localhost", 400),
    ("http:///health", "localhost", 400),
    ("https://localhost/health", "localhost", 501),
]


def test_hosts(server: ScriptedServer, proxy: Proxy) -> None:
    for form, name, status in HOSTS:
        client = Raw(proxy)
        target, host = form.format(port=client.port), name.format(port=client.port)
        lines = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        reply = client.send(lines.encode()).rest()
        assert reply.startswith(b"HTTP/1.1 %d " % status), (target, host)
        if status == 200:
            (received,) = server.received
            assert received.path == "/health"
            assert received.query == ({"a": "b"} if "?" in target else {})
            assert received.headers["host"] == server.url.removeprefix("http://")
            server.received.clear()
        else:
            assert message(reply) and server.received == [], (target, host)


def test_a_web_page_of_elsewhere_is_the_servers_business(
    server: ScriptedServer, proxy: Proxy
) -> None:
    """A preflight and its Origin pass as they are: a llama-server answers them itself."""
    cors = {"Access-Control-Allow-Origin": "http://x", "Access-Control-Allow-Methods": "POST"}
    server.script("/completion", Reply(b"", 204, cors))
    asked = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    reply = httpx.options(f"{proxy.url}/completion", headers=asked, trust_env=False)
    assert (
        reply.status_code == 204
        and cors.items() <= {name.title(): value for name, value in reply.headers.items()}.items()
    )
    assert server.received[0].headers["origin"] == "http://x"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_closes_its_sending_side_is_answered(
    server: ScriptedServer, proxy: Proxy, version: str, is_stream: bool
) -> None:
    hold = Hold()
    pieces = events({"content": "a", "stop": False}, {"content": "b", "stop": True})
    server.script("/completion", Reply([pieces[0], hold, pieces[1]] if is_stream else [hold]))
    client = Raw(proxy).send(head(HOST, "Content-Length: 2", version=version) + b"{}")
    client.socket.shutdown(socket.SHUT_WR)
    assert hold.reached.wait(30)
    hold.release()
    reply = client.rest()
    assert b" 200 " in reply.partition(b"\r\n")[0]
    assert not is_stream or (pieces[0] in reply and pieces[1] in reply)


def test_a_half_closed_client_has_all_its_pipelined_requests_answered(
    server: ScriptedServer, proxy: Proxy
) -> None:
    server.script("/completion", json_reply({"n": 1}), json_reply({"n": 2}), json_reply({"n": 3}))
    request = head(HOST, "Content-Length: 2") + b"{}"
    client = Raw(proxy).send(request * 3)
    client.socket.shutdown(socket.SHUT_WR)
    reply = client.rest()
    assert reply.count(b"HTTP/1.1 200") == 3
    assert [f'"n": {i}'.encode() in reply or f'"n":{i}'.encode() in reply for i in (1, 2, 3)] == [
        True
    ] * 3


def test_half_a_request_is_not_answered(server: ScriptedServer, proxy: Proxy) -> None:
    for half in (b"GET / HT", head(HOST, "Content-Length: 9") + b"{"):
        client = Raw(proxy).send(half)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
    assert server.received == []


@pytest.mark.parametrize("knows_peers", [True, False])
def test_a_half_closed_client_that_vanishes_is_gone_at_the_server(
    server: ScriptedServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, knows_peers: bool
) -> None:
    """Where the system does not tell, an interim reply finds it out."""
    if not knows_peers:
        monkeypatch.setattr(client_connection, "_TABLES", ())
        monkeypatch.setattr(client_connection, "_LOOK_S", 0.01)
    hold = Hold()
    server.script("/completion", Reply([hold]))
    client = Raw(proxy).send(head(HOST, "Content-Length: 2") + b"{}")
    client.socket.shutdown(socket.SHUT_WR)
    assert hold.reached.wait(30)
    client.socket.close()
    assert server.received[0].left.wait(30)
    hold.release()


def test_a_reset_connection_ends_the_request(server: ScriptedServer, proxy: Proxy) -> None:
    hold = Hold()
    server.script("/completion", Reply([hold]))
    client = Raw(proxy).send(head(HOST, "Content-Length: 2") + b"{}")
    assert hold.reached.wait(30)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()
    assert server.received[0].left.wait(30)
    hold.release()


def test_http_1_0_is_answered_and_closed(server: ScriptedServer, proxy: Proxy) -> None:
    """A stream has no chunks there; its end is that of the connection."""
    server.script("/completion", Reply(events({"content": "a"}, {"content": "b"})))
    body = b'{"prompt": "a"}'
    lines = (f"Content-Length: {len(body)}",)
    reply = Raw(proxy).send(head(*lines, version="1.0") + body).rest()
    assert b" 200 " in reply.partition(b"\r\n")[0]
    assert reply.partition(b"\r\n\r\n")[2] == b"".join(events({"content": "a"}, {"content": "b"}))


def test_a_head_that_does_not_come_is_a_408(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "HEAD_S", 0.05)
    for begun in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
        reply = Raw(proxy).send(begun).rest()
        assert reply.startswith(b"HTTP/1.1 408 ") and "head" in message(reply)


def test_a_body_may_take_longer_than_a_head(
    server: ScriptedServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "HEAD_S", 0.05)
    server.script("/completion", json_reply({}))
    client = Raw(proxy).send(head(HOST, "Content-Length: 2", "Connection: close"))
    assert Raw(proxy).rest().startswith(b"HTTP/1.1 408 ")  # so the time for a head is over
    assert client.send(b"{}").rest().startswith(b"HTTP/1.1 200 ")


def test_connections_are_limited(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "MAX_CONNECTIONS", 2)
    first = [Raw(proxy) for _ in range(2)]
    for each in first:
        each.send(b"GET")
    assert Raw(proxy).rest().startswith(b"HTTP/1.1 503 ")
    for each in first:
        each.send(b" /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert each.rest().startswith(b"HTTP/1.1 200 ")


class Parsing:
    """A parser of requests that takes as long as the test wants."""

    def __init__(self, parse: Callable[..., Any]) -> None:
        self._parse, self.begun, self.may_end = parse, threading.Event(), threading.Event()

    def __call__(self, form: Any, body: bytes) -> Any:
        if b"slow" in body:
            self.begun.set()
            assert self.may_end.wait(60)
        return self._parse(form, body)


def test_others_are_served_while_a_request_is_parsed(
    server: ScriptedServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing = Parsing(add_fields)
    monkeypatch.setattr(proxy_module, "add_fields", parsing)
    hold = Hold()
    first, second = events({"content": "a", "stop": False}, {"content": "b", "stop": False})
    server.script("/completion", Reply([first, hold, second]), Reply([first]))
    stream = {"prompt": "x", "stream": True}
    client = httpx.Client(base_url=proxy.url, timeout=60, trust_env=False)
    with client.stream("POST", "/completion", json=stream) as streamed:
        pieces = streamed.iter_raw()
        assert next(pieces) == first
        slow = {"prompt": "slow", "stream": True}
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(client.post("/completion", json=slow))
        )
        thread.start()
        try:
            assert parsing.begun.wait(30)
            assert client.get("/health").status_code == 200
            hold.release()
            assert b"".join(pieces) == second
            assert not replies
        finally:
            parsing.may_end.set()
            thread.join(60)
    assert replies[0].content == first
    client.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"stream":true' + b',"k":0' * 100_000 + b"}", "has more than 65536 keys"),
        (b'{"stream":true,"a":' + b"[" * 200 + b"]" * 200 + b"}", "is nested deeper than 128"),
        (b'{"stream":true,"a":"' + b"x" * 300_000 + b'"}', "is larger than"),
    ],
)
def test_what_is_too_much_passes_unchanged_and_is_found(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, body: bytes, reason: str
) -> None:
    if "larger" in reason:
        monkeypatch.setattr(proxy_module, "MAX_PARSED", 200_000)
    server.script("/completion", Reply(events({"content": "a", "stop": True})))
    trace = TraceStore()
    run = ProxyRun(ServerFacts(server.url), trace)
    reply = httpx.post(f"{run.url}/completion", content=body, timeout=60, trust_env=False)
    assert reply.content == b"".join(events({"content": "a", "stop": True}))
    assert server.received[0].body == body
    while not (run.requests and run.requests[0].is_over):
        run.advance()
    run.stop()
    (found,) = [one for one in recorded(trace) if one.rule == "not-recorded"]
    assert f"it {reason}" in found.message


def test_a_request_of_many_members_takes_bounded_work(
    server: ScriptedServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 MiB of short keys once held everything up for 44 seconds."""
    counted: list[int] = []
    search = request_checks._SIGN.search

    class Counting:
        def search(self, *words: Any) -> Any:
            counted.append(1)
            return search(*words)

    monkeypatch.setattr(request_checks, "_SIGN", Counting())
    server.script("/completion", json_reply({}))
    body = b'{"stream":true,' + b",".join(b'"k%d":0' % i for i in range(900_000)) + b"}"
    assert len(body) > 10 << 20
    reply = httpx.post(f"{proxy.url}/completion", content=body, timeout=60, trust_env=False)
    assert reply.status_code == 200 and server.received[0].body == body
    assert 0 < len(counted) <= 4 * request_checks.MAX_KEYS


@pytest.mark.parametrize("status", [600, 999])
def test_a_reply_without_a_proper_status_is_a_502(proxy: Proxy, status: int) -> None:
    reply = replied(proxy, b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
    assert reply.startswith(b"HTTP/1.1 502 ") and str(status) in message(reply)


def test_a_reply_of_chunks_has_no_length(proxy: Proxy) -> None:
    reply = replied(
        proxy,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n0\r\n\r\n",
    )
    assert reply.startswith(b"HTTP/1.1 200 ") and b"hello" in reply
    assert b"content-length" not in reply.lower()


def replied(proxy: Proxy, reply: bytes) -> bytes:
    """What a client of such a proxy gets where its server sends these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        other = Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", ExchangeQueue())
        other.start()
        lines = head(HOST, "Connection: close", "Content-Length: 2")
        got = Raw(other).send(lines + b"{}").rest()
        other.stop()
        thread.join()
    return got


def test_stopping_does_not_wait_for_half_closed_idle_or_silent_clients(
    server: ScriptedServer, queue: ExchangeQueue
) -> None:
    hold = Hold()
    server.script("/completion", Reply([hold]))
    proxy = Proxy(server.url, queue)
    proxy.start()
    idle, half = Raw(proxy), Raw(proxy).send(b"GET / HT")
    closed = Raw(proxy).send(head(HOST, "Content-Length: 2") + b"{}")
    closed.socket.shutdown(socket.SHUT_WR)
    assert hold.reached.wait(30)
    proxy.stop()
    assert not proxy.is_running
    assert [one.rest() for one in (idle, half)] == [b"", b""]
    # refused, or cut where the head of the reply had already passed
    assert closed.rest().startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 200 "))
    assert server.received[0].left.wait(30)
    hold.release()


def test_a_bad_address_to_listen_at(server: ScriptedServer) -> None:
    with pytest.raises(OptionError, match="Cannot listen"):
        Proxy(server.url, ExchangeQueue(), "no.such.host.invalid")
