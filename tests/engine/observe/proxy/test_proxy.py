"""The proxy between clients and a scripted server: nothing lost, nothing changed, nothing left."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time

import httpx
import pytest

from engine.errors import OptionError
from engine.observe.proxy import proxy as proxy_module
from engine.observe.proxy.exchange_queue import FELL_BEHIND, ExchangeQueue
from engine.observe.proxy.proxy import Proxy, listening_address
from tests.engine.observe.proxy.conftest import Passing, chunk, chunks, eventually
from tests.support.scripted_replies import STREAM, Cut, Hold, Reply, halved, json_reply, stream
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.filterwarnings("error")


def test_a_stream_passes_without_what_was_added_and_is_recorded_with_it(
    server: ScriptedServer, passing: Passing
) -> None:
    server.script("/completion", Reply(halved(chunks(20))))
    body = b'{"prompt": "a", "stream": true}'
    reply = passing.client.post("/completion", content=body)
    assert server.received[0].json == {"prompt": "a", "stream": True, "timings_per_token": True}
    sent = b"".join(chunks(20)).replace(b", ", b", ")
    assert b'"timings"' in sent and b'"timings"' not in reply.content
    assert [json.loads(line[6:]) for line in reply.text.split("\n\n") if line] == [
        chunk(i, timings=False) for i in range(1, 21)
    ]
    request, head, *_, done = passing.until("done")
    assert (request.path, request.data) == ("/completion", server.received[0].body)
    assert request.is_asked_by_us and head.status == 200 and done.kind == "done"
    assert passing.recorded() == sent
    times = [note.at for note in passing.notes]
    assert times == sorted(times)


def test_it_can_be_told_to_add_nothing(server: ScriptedServer) -> None:
    server.script("/completion", Reply(chunks(3)))
    passing = Passing(server.url, adds_fields=False)
    body = b'{"prompt":"a","stream":true}'
    assert passing.client.post("/completion", content=body).content == b"".join(chunks(3))
    assert server.received[0].body == body
    assert not passing.until("done")[0].is_asked_by_us
    passing.stop()


def test_a_stream_kept_by_the_server_is_not_changed(
    server: ScriptedServer, passing: Passing
) -> None:
    """Anyone who reads it again counts the bytes that it got."""
    server.script("/completion", Reply(chunks(3, timings=False)))
    body = b'{"prompt":"a","stream":true}'
    headers = {"X-Conversation-Id": "here"}
    reply = passing.client.post("/completion", content=body, headers=headers)
    assert server.received[0].body == body
    again = passing.client.get("/v1/stream?conv_id=here&from=40")
    assert again.content == reply.content[40:]


def test_requests_pass_as_they_are(server: ScriptedServer, passing: Passing) -> None:
    """Method, path, query, headers and body; those of one hop stay here."""
    server.script("/a%2Fb", json_reply({}))
    body = bytes(range(256)) * 40
    headers = {
        "Authorization": "Bearer secret",
        "Cookie": "a=b",
        "X-Api-Key": "k",
        "X-Odd": "ä".encode("latin-1"),
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Proxy-Authorization": "no",
        "Accept-Encoding": "gzip",
    }
    url = f"{passing.proxy.url}/x/a%2Fb?q=%41&p=a+b"
    passing.client.request("PUT", url, content=body, headers=headers)
    got = server.received[0]
    assert (got.method, got.path, got.query) == ("PUT", "/x/a/b", {"q": "A", "p": "a b"})
    assert got.body == body
    assert got.headers["host"] == server.url.removeprefix("http://")
    for name in ("Authorization", "Cookie", "X-Api-Key", "Accept-Encoding"):
        assert got.headers[name.lower()] == headers[name]
    assert got.headers["x-odd"] == "ä"
    assert got.headers.keys().isdisjoint({"x-hop", "proxy-authorization"})
    assert passing.queue.take() == []


def test_secrets_are_not_in_the_queue(server: ScriptedServer, passing: Passing) -> None:
    reply = json_reply({"content": "x"})
    reply.headers["Set-Cookie"] = "session=secret"
    server.script("/completion", reply, reply)
    for _ in range(2):
        passing.client.post(
            "/completion?key=secret",
            json={"prompt": "a"},
            headers={"Authorization": "Bearer secret", "X-Api-Key": "secret"},
        )
    passing.client.cookies.clear()
    notes = passing.until("done", 2)
    assert "secret" not in repr(notes)
    assert "cookie" not in server.received[0].headers


def test_cookies_of_one_client_do_not_reach_another(
    server: ScriptedServer, passing: Passing
) -> None:
    reply = json_reply({})
    reply.headers["Set-Cookie"] = "session=secret"
    server.script("/completion", reply, json_reply({}))
    for _ in range(2):
        httpx.post(f"{passing.proxy.url}/completion", json={"prompt": "a"}, trust_env=False)
    assert "cookie" not in server.received[1].headers


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET", "DELETE"])
def test_other_methods_pass(server: ScriptedServer, passing: Passing, method: str) -> None:
    headers = {"Access-Control-Allow-Origin": "*", "X-Two": "2", "Content-Type": "text/plain"}
    server.script("/v1/chat/completions", Reply(b"" if method == "HEAD" else b"hi", 200, headers))
    reply = passing.client.request(method, "/v1/chat/completions", headers={"Origin": "http://x"})
    assert server.received[0].method == method
    assert server.received[0].headers["origin"] == "http://x"
    assert reply.headers["access-control-allow-origin"] == "*" and reply.headers["x-two"] == "2"
    assert reply.content == (b"" if method == "HEAD" else b"hi")
    assert passing.queue.take() == []


def test_a_large_body_is_streamed(
    server: ScriptedServer, passing: Passing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "MAX_PARSED", 100_000)
    server.script("/completion", Reply(chunks(2)), Reply(chunks(2)))
    body = b'{"stream":true,"prompt":"' + b"x" * 400_000 + b'"}'
    for content in (body, iter([body[:200_000], body[200_000:]])):  # with a length, in chunks
        reply = passing.client.post("/completion", content=content)
        assert reply.content == b"".join(chunks(2))
        assert server.received[-1].body == body
    notes = passing.until("done", 2)
    assert [note.data for note in notes if note.kind == "request"] == [b"{}", b"{}"]


def test_a_compressed_reply_passes_compressed_and_is_recorded_decoded(
    server: ScriptedServer, passing: Passing
) -> None:
    content = json.dumps({"content": "x" * 500}).encode()
    packed = gzip.compress(content)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    server.script("/completion", Reply(packed, 200, headers))
    with passing.client.stream("POST", "/completion", json={"prompt": "a"}) as reply:
        assert b"".join(reply.iter_raw()) == packed
    passing.until("done")
    assert passing.recorded() == content


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("br", b"\x00"),
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(bytes(2**25), 9, mtime=0)[:30_000]),
    ],
)
def test_what_cannot_be_decoded_passes_unrecorded(
    server: ScriptedServer, passing: Passing, encoding: str, data: bytes
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    server.script("/completion", Reply(data, 200, headers))
    with passing.client.stream("POST", "/completion", json={"prompt": "a"}) as reply:
        assert b"".join(reply.iter_raw()) == data
    assert "encoding" in passing.until("unrecorded")[-1].reason
    assert passing.recorded() == b""


def test_pieces_pass_at_once(server: ScriptedServer, passing: Passing) -> None:
    """The client has the first event while the server has not sent the second."""
    hold = Hold()
    first, second = chunks(2)
    server.script("/completion", Reply([first, hold, second]))
    body = {"prompt": "a", "stream": True}
    with passing.client.stream("POST", "/completion", json=body) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines)[6:]) == chunk(1, timings=False)
        hold.release()
        assert next(line for line in lines if line).endswith('"stop": false}')


def test_a_slow_client_holds_the_server_back_and_nothing_piles_up(server: ScriptedServer) -> None:
    piece = b"x" * 2**16
    server.script("/embedding", Reply([piece] * 800, 200, dict(STREAM)))  # 50 MiB
    passing = Passing(server.url)
    sent = passing.client.stream("POST", "/embedding", content=b"{}")
    with sent as reply:
        pieces = reply.iter_raw()
        n_bytes = len(next(pieces))
        time.sleep(0.3)
        assert not server.received[0].answered.is_set()  # it waits
        n_bytes += sum(map(len, pieces))
    assert n_bytes == 800 * 2**16
    passing.stop()


def test_a_tape_that_nobody_reads_does_not_hold_up_clients(server: ScriptedServer) -> None:
    passing = Passing(server.url, limit=8000)
    server.script("/completion", *(Reply(chunks(40)) for _ in range(6)))
    for _ in range(6):
        reply = passing.client.post("/completion", json={"prompt": "a", "stream": True})
        assert reply.content.count(b"content") == 40
    notes = passing.queue.take()
    assert [note.reason for note in notes if note.kind == "unrecorded"][:1] == [FELL_BEHIND]
    assert sum(512 + len(note.data) for note in notes) < 8000 + 6 * 512
    assert passing.queue.n_unrecorded == 6 - sum(note.kind == "request" for note in notes) > 0
    passing.stop()


def test_many_at_once(server: ScriptedServer, passing: Passing) -> None:
    hold = Hold()
    first, *rest = chunks(10)
    server.script("/completion", *(Reply([first, hold, *rest]) for _ in range(40)))
    texts: list[bytes] = []

    def ask() -> None:
        body = {"prompt": "a", "stream": True}
        texts.append(passing.client.post("/completion", json=body).content)

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(server.received) == 40)  # all of them are open
    hold.release()
    for thread in threads:
        thread.join()
    passing.until("done", 40)
    assert {len(text) for text in texts} == {len(texts[0])}
    assert {passing.recorded(i) for i in range(40)} == {b"".join(chunks(10))}


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    ],
)
def test_what_cannot_be_passed_on_is_a_501(
    server: ScriptedServer, passing: Passing, request_line: bytes
) -> None:
    url = passing.client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as client:
        client.sendall(request_line)
        told = b""
        while b"}}" not in told:
            told += client.recv(65536)
    assert told.startswith(b"HTTP/1.1 501 ") and b'"message": "' in told
    assert server.received == []


def test_an_offer_of_http_2_is_no_upgrade(server: ScriptedServer, passing: Passing) -> None:
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "A"}
    assert passing.client.get("/health", headers=headers).status_code == 200
    assert server.received[0].headers.keys().isdisjoint({"upgrade", "http2-settings"})


def test_expect_is_answered_here(server: ScriptedServer, passing: Passing) -> None:
    server.script("/completion", json_reply({"content": ""}))
    url = passing.client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as client:
        client.sendall(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"{}")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert server.received[0].body == b"{}"


def test_a_server_below_a_path(server: ScriptedServer) -> None:
    passing = Passing(f"{server.url}/llama/")
    passing.client.get("/health?a=1")
    assert (server.received[0].path, server.received[0].query) == ("/llama/health", {"a": "1"})
    passing.stop()


def test_addresses(server: ScriptedServer) -> None:
    made = Proxy(server.url, ExchangeQueue())
    port = int(made.url.rpartition(":")[2])
    assert made.is_local and made.url == f"http://127.0.0.1:{port}"
    with pytest.raises(OptionError, match=f"127.0.0.1:{port}: Address already in use"):
        Proxy(server.url, ExchangeQueue(), port=port)
    made.stop()
    everywhere = Proxy(server.url, ExchangeQueue(), "0.0.0.0")
    assert not everywhere.is_local
    everywhere.stop()
    with pytest.raises(OptionError, match="the server's own"):
        Proxy(f"http://localhost:{port}", ExchangeQueue(), port=port)
    with pytest.raises(OptionError, match="is not the address of a server"):
        Proxy("ftp://a", ExchangeQueue())
    with pytest.raises(OptionError, match="Cannot listen at"):
        Proxy(server.url, ExchangeQueue(), "192.0.2.1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8081", ("127.0.0.1", 8081)),
        ("8081", ("127.0.0.1", 8081)),
        (":8081", ("127.0.0.1", 8081)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_without_a_host_is_this_machine(text: str, expected: tuple[str, int]) -> None:
    assert listening_address(text) == expected


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:", "a:65536", "a:-1", "a:٣"])
def test_what_is_no_address_to_listen_at(text: str) -> None:
    with pytest.raises(OptionError, match="is not an address to listen at"):
        listening_address(text)


def test_events_of_a_capture_pass(passing: Passing, server: ScriptedServer) -> None:
    """Timings that a server gives anyway stay: those of the last event."""
    with ScriptedServer("mtp") as captured:
        request = captured.capture["requests"][0]
        server.script("/completion", Reply(stream(request)))
        body = {k: v for k, v in request["body"].items() if k != "timings_per_token"}
        reply = passing.client.post("/completion", json=body)
    got = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    assert ["timings" in one for one in got] == [False] * (len(got) - 1) + [True]
    assert got[-1]["generation_settings"]["timings_per_token"] is False
    passing.until("done")
    assert passing.recorded() == b"".join(stream(request))


def test_a_cut_is_not_taken_for_an_end(server: ScriptedServer, passing: Passing) -> None:
    server.script("/embedding", Reply([b"half", Cut()]))
    with pytest.raises(httpx.RemoteProtocolError):
        passing.client.post("/embedding", content=b"{}")
