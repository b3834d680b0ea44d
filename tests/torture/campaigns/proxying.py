"""Hostile clients of the proxy among good ones."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.observe.files.capture import capture_of
from engine.observe.proxy.proxy_run import ProxyRun
from engine.observe.rounds.observed_run import ServerFacts
from engine.trace.store import TraceStore
from tests.torture import awake
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.raw_server import Asked, RawServer, chunk, reply

_WAIT_S = 10.0
"""How long a client waits. The server answers at once; the proxy takes milliseconds."""
_MIB = 2**20
_KEYS = 1_000_000
_ANSWERED, _REFUSED, _ANY = "answered", "refused", "any"


@dataclass(frozen=True)
class _Hostile:
    """What a client sends, and what must come of it. has_more: it sends nothing more, but stays
    connected until it is answered; else it is half-closed."""

    sent: Callable[[bytes, int], list[bytes]]
    comes: str
    is_half_closed: bool = False


def _head(body: bytes, *lines: bytes, first: bytes = b"POST /completion HTTP/1.1") -> bytes:
    """A head of a request for a body. lines: in place of a Host or a length."""
    names = {line.partition(b":")[0].lower() for line in lines}
    own = [b"Host: HOST"] * (b"host" not in names)
    own += [b"Content-Length: %d" % len(body)] * (
        names.isdisjoint((b"content-length", b"transfer-encoding", b"no-length"))
    )
    kept = [line for line in lines if not line.startswith(b"No-Length")]
    return b"\r\n".join([first, b"Connection: close", *own, *kept, b"", b""])


def _whole(
    *lines: bytes, first: bytes = b"POST /completion HTTP/1.1"
) -> Callable[..., list[bytes]]:
    return lambda body, n: [_head(body, *lines, first=first) + body]


def _body(made: Callable[[int], bytes]) -> Callable[[bytes, int], list[bytes]]:
    return lambda _, n: [_head(large := made(n)) + large]


_CHUNKED = b"Transfer-Encoding: chunked"
_HOSTILE: dict[str, _Hostile] = {
    "both lengths": _Hostile(
        lambda body, n: [_head(body, b"Content-Length: 5", _CHUNKED) + chunk(body) + chunk(b"")],
        _REFUSED,
    ),
    "both, chunked first": _Hostile(
        lambda body, n: [_head(body, _CHUNKED, b"Content-Length: 5") + chunk(body) + chunk(b"")],
        _REFUSED,
    ),
    "two lengths": _Hostile(_whole(b"Content-Length: 5", b"Content-Length: 6"), _REFUSED),
    "negative length": _Hostile(_whole(b"Content-Length: -5"), _REFUSED),
    "no number": _Hostile(_whole(b"Content-Length: 0x10"), _REFUSED),
    "huge length": _Hostile(_whole(b"Content-Length: " + b"9" * 40), _REFUSED),
    "bad chunk": _Hostile(
        lambda body, n: [_head(body, _CHUNKED) + b"zz\r\n" + body + b"\r\n0\r\n\r\n"], _REFUSED
    ),
    "chunk too long": _Hostile(
        lambda body, n: [_head(body, _CHUNKED) + b"f" * 40 + b"\r\n" + body], _REFUSED
    ),
    "other coding": _Hostile(_whole(b"Transfer-Encoding: gzip, chunked"), _REFUSED),
    "many keys": _Hostile(
        _body(lambda n: b"{" + b",".join(b'"k%d":1' % i for i in range(_KEYS)) + b"}"), _ANY
    ),
    "many keys in a stream": _Hostile(
        _body(lambda n: b'{"stream":true' + b"".join(b',"k%d":1' % i for i in range(_KEYS)) + b"}"),
        _ANY,
    ),
    "same keys": _Hostile(_body(lambda n: b"{" + b'"a":1,' * _KEYS + b'"b":1}'), _ANY),
    "deep": _Hostile(_body(lambda n: b'{"a":' + b"[" * (n << 7) + b"}"), _ANY),
    "deep objects": _Hostile(_body(lambda n: b'{"a":' * (n << 6)), _ANY),
    "many numbers": _Hostile(_body(lambda n: b'{"prompt":[' + b"1," * (n << 10) + b"1]}"), _ANY),
    "digits": _Hostile(_body(lambda n: b'{"n":' + b"9" * (n << 8) + b"}"), _ANY),
    "bad text": _Hostile(_body(lambda n: b'{"prompt":"\xff\xfe\0\xed\xa0\x80"}'), _ANY),
    "other host": _Hostile(_whole(b"Host: evil.example"), _REFUSED),
    "two hosts": _Hostile(_whole(b"Host: HOST", b"Host: evil.example"), _REFUSED),
    "host of signs": _Hostile(_whole(b"Host: a b/../@c"), _REFUSED),
    "null in head": _Hostile(_whole(b"X: a\0b"), _REFUSED),
    "null in path": _Hostile(_whole(first=b"POST /comp\0letion HTTP/1.1"), _REFUSED),
    "folded": _Hostile(_whole(b"X: a\r\n b"), _REFUSED),
    "space before colon": _Hostile(_whole(b"Content-Type : x"), _REFUSED),
    "other version": _Hostile(_whole(first=b"POST /completion HTTP/9.9"), _REFUSED),
    "other scheme": _Hostile(_whole(first=b"POST http://evil.example/ HTTP/1.1"), _REFUSED),
    "connect": _Hostile(_whole(first=b"CONNECT evil.example:443 HTTP/1.1"), _REFUSED),
    "no http": _Hostile(lambda body, n: [b"\x16\x03\x01" + bytes(n % 999) + b"\r\n\r\n"], _REFUSED),
    "huge header": _Hostile(_whole(b"X: " + b"y" * (1 << 18)), _REFUSED),
    "many headers": _Hostile(_whole(*(b"X%d: y" % i for i in range(5000))), _REFUSED),
    "long path": _Hostile(_whole(first=b"POST /" + b"a" * (1 << 18) + b" HTTP/1.1"), _REFUSED),
    "half closed": _Hostile(_whole(), _ANSWERED, is_half_closed=True),
    "half closed stream": _Hostile(
        lambda body, n: [_head(b := body[:-1] + b',"stream":true}') + b],
        _ANSWERED,
        is_half_closed=True,
    ),
    "half a request": _Hostile(
        lambda body, n: [(_head(body) + body)[: n % (100 + len(body))]], _ANY, is_half_closed=True
    ),
    "drips": _Hostile(
        lambda body, n: [bytes([byte]) for byte in (_head(body) + body)[: n % 300]], _ANY
    ),
    "old": _Hostile(_whole(b"Host: HOST", first=b"POST /completion HTTP/1.0"), _ANSWERED),
    "expect": _Hostile(_whole(b"Expect: 100-continue"), _ANSWERED),
    "chunked": _Hostile(
        lambda body, n: [_head(body, _CHUNKED) + b"".join(_chunks(body, n)) + chunk(b"")], _ANSWERED
    ),
    "pipelined": _Hostile(
        lambda body, n: [
            _head(body).replace(b"Connection: close\r\n", b"") + body + _head(body) + body
        ],
        _ANSWERED,
    ),
    "smuggled": _Hostile(
        lambda body, n: [_head(b"") + b"GET /smuggled HTTP/1.1\r\nHost: HOST\r\n\r\n"], _ANY
    ),
    "gone": _Hostile(lambda body, n: [_head(body) + body], "gone"),
}


def _chunks(body: bytes, n: int) -> list[bytes]:
    size = 1 + n % len(body)
    return [chunk(body[i : i + size]) for i in range(0, len(body), size)]


_GOOD = ("plain", "stream", "asked stream", "facts")


def _draw(random: np.random.Generator, number: int) -> Case:
    names = list(_HOSTILE)
    n = 0 if number % 8 == 0 else int(random.integers(1, 6))
    # each comes in turn, and one of those to be answered in every case
    chosen = [names[(number * 5 + i) % len(names)] for i in range(n)]
    answered = [name for name in names if _HOSTILE[name].comes == _ANSWERED]
    chosen[:1] = [answered[number % len(answered)]] * bool(n)
    return {
        "clients": [
            {
                "hostile": name,
                "n": int(random.integers(1, 4096)),
                "good": str(random.choice(_GOOD)),
                "meanwhile": bool(random.random() < 0.5),
            }
            for name in chosen
        ]
    }


_TIMINGS = {"prompt_n": 1, "predicted_n": 3, "predicted_ms": 3.0, "draft_n": 2}
_TIMINGS |= {"draft_n_accepted": 1, "cache_n": 0, "prompt_ms": 1.0}


def _answer(asked: Asked, link: socket.socket) -> None:
    """What the server says depends on the request alone; it reads none that is large."""
    try:
        said: Any = json.loads(asked.body) if len(asked.body) < _MIB else None
    except (ValueError, RecursionError):
        said = None
    said = said if isinstance(said, dict) else {}
    if asked.path == "/props":
        link.sendall(reply(_facts()))
    elif said.get("stream"):
        link.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        link.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in _stream(said, timings=bool(said.get("timings_per_token"))):
            link.sendall(chunk(piece))
        link.sendall(chunk(b""))
    else:
        link.sendall(reply(_plain(said)))


def _facts() -> bytes:
    return json.dumps({"default_generation_settings": {"n_ctx": 64}, "total_slots": 1}).encode()


def _plain(said: dict[str, Any]) -> bytes:
    return json.dumps({"content": f"of {said.get('prompt')!r:.80}", "stop": True}).encode()


def _stream(said: dict[str, Any], *, timings: bool) -> list[bytes]:
    pieces = []
    for i in range(12):
        event = {"content": f"{said.get('prompt')!r:.40} {i}\u00e9", "stop": i == 11, "tokens": [i]}
        if timings or i == 11:
            event["timings"] = _TIMINGS | {"predicted_n": i + 1}
        pieces.append(f"data: {json.dumps(event)}\n\n".encode())
    return pieces


class _Mistakes(logging.Handler):
    """What is logged as a mistake of the program."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.said.append(f"{record.name}: {record.getMessage()[:200]} {error!r:.200}")


def _play(case: Case, _: Path) -> Figures:
    mistakes = _Mistakes()
    logging.getLogger().addHandler(mistakes)
    logging.getLogger("asyncio").propagate = True
    hook = threading.excepthook
    threading.excepthook = lambda args: mistakes.said.append(repr(args.exc_value))
    figures: Figures = {"good": 0, "hostile": 0, "refused": 0, "answered": 0}
    with RawServer(_answer) as server:
        run = ProxyRun(ServerFacts(server.url), TraceStore(), "127.0.0.1", 0)
        try:
            _all(case, run, server, figures)
        finally:
            run.stop()
            threading.excepthook = hook
    assert not mistakes.said, mistakes.said[0]
    _recorded(case, run)
    return figures


def _all(case: Case, run: ProxyRun, server: RawServer, figures: Figures) -> None:
    address = run.url.removeprefix("http://")
    wrong: list[str] = []
    for i, client in enumerate(case["clients"]):
        thread = threading.Thread(target=_hostile, args=(address, client, i, wrong, figures))
        thread.start()
        if not client["meanwhile"]:
            thread.join(_WAIT_S)
        _good(address, client["good"], f"good {i}")
        figures["good"] += 1
        thread.join(2 * _WAIT_S)
        assert not thread.is_alive(), f"{client['hostile']}: neither answered nor refused"
        assert not wrong, wrong[0]
        run.advance()
    for kind in _GOOD:
        _good(address, kind, f"last {kind}")
        figures["good"] += 1
    assert not any(one.path == "/smuggled" and one.body for one in server.received)
    until = awake.now() + _WAIT_S
    while run._open and awake.now() < until:
        run.advance()


def _good(address: str, kind: str, prompt: str) -> None:
    """Raises AssertionError unless the reply is byte for byte what the server sent, but for what
    was asked for by the proxy."""
    host, port = address.split(":")
    link = http.client.HTTPConnection(host, int(port), timeout=_WAIT_S)
    said: dict[str, Any] = {"prompt": prompt}
    if kind == "facts":
        asked, expected = ("GET", "/props", None), _facts()
    else:
        if kind != "plain":
            said |= {"stream": True}
        if kind == "asked stream":
            said |= {"timings_per_token": True}
        timings = kind == "asked stream"
        expected = _plain(said) if kind == "plain" else b"".join(_stream(said, timings=timings))
        asked = ("POST", "/completion", json.dumps(said).encode())
    try:
        link.request(*asked, headers={"Content-Type": "application/json"})
        response = link.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise AssertionError(f"a good client ({kind}) gets {error!r}") from None
    finally:
        link.close()
    assert response.status == 200, f"a good client ({kind}) gets {response.status} {body[:200]!r}"
    assert body == expected, f"a good client ({kind}) gets other bytes: {body[:300]!r}"


def _hostile(
    address: str, client: dict[str, Any], i: int, wrong: list[str], figures: Figures
) -> None:
    host, port = address.split(":")
    one = _HOSTILE[client["hostile"]]
    body = json.dumps({"prompt": f"hostile {i}"}).encode()
    got = b""
    try:
        with socket.create_connection((host, int(port)), _WAIT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BrokenPipeError, ConnectionResetError):
                for piece in one.sent(body, client["n"]):
                    link.sendall(piece.replace(b"Host: HOST", b"Host: " + address.encode()))
            if one.comes == "gone":
                return
            if one.is_half_closed or one.comes == _ANY:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while more := link.recv(1 << 16):
                    got += more
    except TimeoutError:
        wrong.append(f"{client['hostile']}: no end of the reply, which is {got[:200]!r} so far")
        return
    figures["hostile"] += 1
    status = got.split(b" ", 2)[1] if got.startswith(b"HTTP/1.") else b""
    if one.comes == _REFUSED:
        figures["refused"] += 1
        if status[:1] not in (b"4", b"5") or status not in (b"501", b"505", status):
            wrong.append(f"{client['hostile']}: is not refused: {got[:300]!r}")
        elif status[:1] == b"5" and status not in (b"501", b"505"):
            wrong.append(f"{client['hostile']}: is refused as a mistake of ours: {got[:300]!r}")
    elif one.comes == _ANSWERED:
        figures["answered"] += 1
        n = 2 if client["hostile"] == "pipelined" else 1
        if got.count(b" 200 OK") != n or got.count(f"hostile {i}".encode()) < n:
            wrong.append(f"{client['hostile']}: is not answered: {got[:300]!r}")
    elif status == b"500":
        wrong.append(f"{client['hostile']}: {got[:300]!r}")


def _recorded(case: Case, run: ProxyRun) -> None:
    """Raises AssertionError unless the good requests are recorded as the server answered them."""
    kept = {str(one.body.get("prompt")): one for one in capture_of(run.observed).requests}
    good = {f"good {i}": one["good"] for i, one in enumerate(case["clients"])}
    good |= {f"last {kind}": kind for kind in _GOOD}
    for prompt, kind in good.items():
        if kind == "facts":
            continue
        assert prompt in kept, f"a good request ({kind}) is not recorded"
        body = b"".join(piece for _, piece in kept[prompt].pieces)
        said = {"prompt": prompt}
        expected = _plain(said) if kind == "plain" else b"".join(_stream(said, timings=True))
        assert body == expected, f"recorded of a good request ({kind}): {body[:300]!r}"


def _prepare() -> None:
    import h11  # noqa: F401
    import httpx  # noqa: F401
    import uvicorn.protocols.http.h11_impl  # noqa: F401


CAMPAIGN = Campaign(
    "proxying",
    "Good requests get what the server said, hostile ones 4xx; the record is what passed.",
    _draw,
    _play,
    _prepare,
    seconds=120.0,
    n_bytes=2**30,
    batch=8,
    n_least=8,
)
