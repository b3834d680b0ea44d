"""What ends early at the proxy: clients that leave, servers that fail, a stop."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest

from engine.observe.proxy import proxy as proxy_module
from engine.observe.proxy.proxy import ENDED
from tests.engine.observe.proxy.conftest import Passing, chunks, eventually, open_files
from tests.support.scripted_replies import STREAM, Hold, Reply, cut
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.filterwarnings("error")


def test_a_client_that_leaves_is_gone_at_the_server(
    server: ScriptedServer, passing: Passing
) -> None:
    hold = Hold()
    server.script("/completion", Reply([*chunks(1), hold, *chunks(2)]))
    body = {"prompt": "a", "stream": True}
    with passing.client.stream("POST", "/completion", json=body) as reply:
        next(reply.iter_lines())
    passing.until("left")
    assert server.received[0].left.wait(60)
    hold.release()


def test_a_client_that_leaves_within_its_request_is_gone_at_the_server(
    server: ScriptedServer, passing: Passing
) -> None:
    host, port = passing.client.base_url.host, passing.client.base_url.port
    for path in (b"/completion", b"/embedding"):
        with socket.create_connection((host, port)) as client:
            client.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % path
            )
    assert passing.client.get("/health").status_code == 200
    assert [one.path for one in server.received] == ["/health"]


def test_a_server_that_is_not_there_is_a_502(server: ScriptedServer, passing: Passing) -> None:
    server.kill()
    reply = passing.client.post("/completion", json={"prompt": "a"})
    assert reply.status_code == 502
    message = reply.json()["error"]["message"]
    assert message == f"{server.url} cannot be reached: connection refused."
    assert passing.until("broke")[-1].reason == message
    assert passing.client.get("/props").status_code == 502
    server.restart()


def test_a_server_that_says_nothing_is_a_502() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with listener.accept()[0] as connection:
                connection.recv(100)

        thread = threading.Thread(target=hang_up)
        thread.start()
        passing = Passing(f"http://127.0.0.1:{listener.getsockname()[1]}")
        reply = passing.client.post("/completion", json={"prompt": "a"})
        assert reply.status_code == 502
        assert "cannot be reached" in reply.json()["error"]["message"]
        thread.join()
        passing.stop()


def test_a_reply_that_breaks_off_breaks_off_for_the_client_too(
    server: ScriptedServer, passing: Passing
) -> None:
    pieces = cut(chunks(5, timings=False), 2)
    server.script("/completion", Reply(pieces))
    got = b""
    body = {"prompt": "a", "stream": True}
    with passing.client.stream("POST", "/completion", json=body) as reply:
        arriving = reply.iter_raw()
        with suppress(httpx.RemoteProtocolError):
            while True:
                got += next(arriving)
    assert got == b"".join(piece for piece in pieces if isinstance(piece, bytes))
    assert "broke off" in passing.until("broke")[-1].reason
    assert passing.recorded() == got
    assert passing.client.get("/health").status_code == 200


def test_a_failure_of_ours_is_told_and_ends_one_request_only(
    server: ScriptedServer,
    passing: Passing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("not foreseen")

    with monkeypatch.context() as broken:
        broken.setattr(proxy_module, "add_fields", fails)
        reply = passing.client.post("/completion", json={"prompt": "a"})
    assert reply.status_code == 500 and "not foreseen" in reply.json()["error"]["message"]
    assert "the proxy failed" in caplog.text
    assert passing.client.get("/health").status_code == 200


def test_a_request_is_ended_by_hand(server: ScriptedServer, passing: Passing) -> None:
    hold = Hold()
    server.script("/completion", Reply([*chunks(1), hold]))
    body = {"prompt": "a", "stream": True}
    with passing.client.stream("POST", "/completion", json=body) as reply:
        passing.proxy.abort(passing.until("data")[0].request)
        with pytest.raises(httpx.RemoteProtocolError):
            reply.read()
    passing.until("left")
    assert server.received[0].left.wait(60)
    hold.release()


def test_stopping_ends_what_is_open_and_leaves_nothing(server: ScriptedServer) -> None:
    before, n_files = set(threading.enumerate()), open_files()
    hold = Hold()
    server.script("/completion", Reply([*chunks(1), hold]), Reply([hold]))
    passing = Passing(server.url)
    told: list[Any] = []

    def ask() -> None:
        try:
            reply = httpx.post(
                f"{passing.proxy.url}/completion",
                json={"prompt": "a", "stream": True},
                timeout=60,
                trust_env=False,
            )
            told.append(reply.status_code)
        except httpx.HTTPError as error:
            told.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(server.received) == 2)
    assert len(passing.until("data")) > 0
    passing.proxy.stop()
    passing.proxy.stop()
    for thread in threads:
        thread.join(60)
    assert len(told) == 2
    passing.until("left", 2)
    assert all(one.left.wait(60) for one in server.received)
    hold.release()
    with pytest.raises(httpx.ConnectError):
        passing.client.get("/health")
    passing.client.close()
    assert set(threading.enumerate()) <= before
    eventually(lambda: open_files() <= n_files)


def test_stopping_tells_those_who_wait_for_a_reply() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        passing = Passing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        told: list[Any] = []
        thread = threading.Thread(
            target=lambda: told.append(passing.client.post("/completion", content=b"{}"))
        )
        thread.start()
        passing.until("request")
        passing.proxy.stop()
        thread.join(60)
        passing.client.close()
    assert told[0].status_code == 503 and told[0].json()["error"]["message"] == ENDED


def test_stopping_does_not_wait_for_a_client_that_does_not_read(server: ScriptedServer) -> None:
    hold = Hold()
    server.script("/embedding", Reply([*[b"x" * 2**16] * 800, hold], 200, dict(STREAM)))
    passing = Passing(server.url)
    url = passing.client.base_url
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(
            b"POST /embedding HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        )
        eventually(lambda: len(server.received) == 1)
        passing.stop()
        assert not passing.proxy.is_running
    assert server.received[0].left.wait(60)
    hold.release()
