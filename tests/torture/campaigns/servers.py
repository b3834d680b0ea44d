"""Servers that answer wrongly, clients that behave badly: a sentence, data kept, nothing left."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.__main__ import main
from engine.observe.proxy.exchange_queue import ExchangeQueue
from engine.observe.proxy.proxy import Proxy
from engine.trace.records import EMITTED_KINDS
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.scripted_replies import (
    LOADING,
    NO_METRICS,
    NOT_JSON,
    UNAUTHORIZED,
    WEB_PAGE,
    Cut,
    Pause,
    Reply,
    Step,
    backwards,
    error_reply,
    halved,
    json_reply,
    stream,
    without_timings,
)
from tests.support.scripted_server import ScriptedServer
from tests.torture import awake
from tests.torture.campaign import Campaign, Case, Figures

_QUESTIONS = ("/props", "/v1/models", "/slots", "/metrics", "/health", "/tokenize")
_ANSWERS = {
    "not json": NOT_JSON,
    "web page": WEB_PAGE,
    "loading": LOADING,
    "no key": UNAUTHORIZED,
    "no metrics": NO_METRICS,
    "error": error_reply(500, "x\x1b[31m\n" * 200),
    "nothing": Reply(b"", 200, {}),
    "list": json_reply([1, 2]),
    "null": json_reply(None),
    "deep": Reply(b"[" * 100_000, 200, {"Content-Type": "application/json"}),
    "large": Reply(
        b'{"a": "' + b"x" * (18 << 20) + b'"}', 200, {"Content-Type": "application/json"}
    ),
    "redirect": Reply(b"", 302, {"Location": "http://127.0.0.1:1/"}),
    "cut": Reply((b'{"default_', Cut()), 200, {}),
    "backwards": Reply(b"llamacpp:prompt_tokens_total -5\nllamacpp:x nan\n\xff\n", 200, {}),
}
_CHANGES = ("cut", "pause", "garbage", "drop", "twice", "swap", "large", "nul", "junk", "no space")
_JUNK = (None, "x", -1, 10**30, 1e300, True, [], {}, "\x1b[31m")
_LARGE = 10 << 20
_OPEN_S = 4.0


def _draw(random: np.random.Generator, number: int) -> Case:
    """One of four servers answers as it should."""
    if number % 4 == 0:
        case: Case = {"answers": [], "steps": [], "whole": "", "restart": False}
        return case | {"n_prompts": int(random.integers(1, 4))}
    if number % 4 == 3:
        return {"clients": [_client(random) for _ in range(int(random.integers(1, 9)))]}
    answers = [
        [_pick(random, _QUESTIONS), _pick(random, list(_ANSWERS))]
        for _ in range(int(random.choice([0, 0, 1, 2, 4])))
    ]
    steps = [
        {
            "how": _pick(random, _CHANGES),
            "at": int(random.integers(1 << 12)),
            "junk": int(random.integers(len(_JUNK))),
        }
        for _ in range(int(random.choice([0, 1, 1, 2, 4])))
    ]
    whole = _pick(random, ("", "", "", "halved", "backwards", "without timings"))
    return {
        "answers": answers,
        "steps": steps,
        "whole": whole,
        "restart": bool(random.random() < 0.15),
        "n_prompts": int(random.integers(1, 4)),
    }


def _pick(random: np.random.Generator, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _client(random: np.random.Generator) -> dict[str, Any]:
    kinds = ("whole", "slow", "gone", "half a request", "no http", "idle", "large header")
    return {"kind": _pick(random, kinds), "n": int(random.integers(1, 2000))}


def _play(case: Case, folder: Path) -> Figures:
    with ScriptedServer("mtp") as server:
        threads, files = threading.active_count(), _n_files()
        figures = _clients(case, server) if "clients" in case else _observed(case, server, folder)
        _settled(lambda: threading.active_count() <= threads, "threads are left")
        _settled(lambda: _n_files() <= files + 1, "files or sockets are left open")
    return figures


def _observed(case: Case, server: ScriptedServer, folder: Path) -> Figures:
    request = server.capture["requests"][0]
    pieces = {
        "halved": halved,
        "backwards": lambda p: backwards(p, 9),
        "without timings": without_timings,
    }.get(case["whole"], list)(stream(request))
    for path, name in case["answers"]:
        server.script(path, *[_ANSWERS[name]] * 3)
    server.script("/completion", Reply(_changed(pieces, case["steps"])))
    words = ["observe", server.url, "--trace", str(folder / "trace"), "-n", "96"]
    words += ["-p", request["body"]["prompt"]] * case["n_prompts"]
    if case["restart"]:
        threading.Timer(0.2, server.restart).start()
    err, out = sys.stderr, sys.stdout
    sys.stderr, sys.stdout = io.StringIO(), io.StringIO()
    try:
        status, said = main(words), sys.stderr.getvalue()
    finally:
        sys.stderr, sys.stdout = err, out
    assert status in (0, 1, 2), status
    assert "Traceback" not in said, said
    assert not status or said.strip(), f"status {status} without a word"
    for line in said.splitlines():
        assert line.isprintable() and len(line) < 900, line[:900]
    kept = (folder / "trace").exists()
    store = open_trace(folder / "trace") if kept else None
    assert kept or status, "it ends well without a trace"
    if not (case["answers"] or case["steps"] or case["whole"] or case["restart"]):
        assert status == 0, f"a server that answers as it should is refused: {said[-500:]}"
        assert store is not None
        text = "".join(piece.decode() for piece in _emitted(store))
        wanted = "".join(json.loads(p[6:])["content"] for p in pieces) * case["n_prompts"]
        assert text == wanted, f"{text!r} was recorded of {wanted!r}"
    return {f"status_{status}": 1, "traces": kept}


def _emitted(store: TraceStore) -> list[bytes]:
    """Tokens of the text, as bytes."""
    kinds, ids = store.tokens.texts("kind"), store.tokens.column("token_id").tolist()
    return [
        store.pieces.get(i, b"?") for i, k in zip(ids, kinds, strict=True) if k in EMITTED_KINDS
    ]


def _changed(pieces: list[bytes], steps: list[dict[str, Any]]) -> list[Step]:
    found: list[Step] = list(pieces)
    for step in steps:
        at = step["at"] % max(1, len(found))
        piece = found[at]
        if not isinstance(piece, bytes):
            continue
        found[at : at + 1] = {
            "cut": lambda p=piece: [p[: len(p) // 2], Cut()],
            "pause": lambda p=piece: [Pause(0.3), p],
            "garbage": lambda p=piece: [b"data: {\xff\xfe]\n\n", p],
            "drop": list,
            "twice": lambda p=piece: [p, p],
            "swap": lambda p=piece: [*reversed(p.partition(b"data"))],
            "large": lambda p=piece: [p, b"data: " + b"x" * _LARGE + b"\n\n"],
            "nul": lambda p=piece: [p.replace(b'"content":"', b'"content":"\\u0000\\ud800')],
            "junk": lambda p=piece, which=step["junk"]: [_junk(p, which)],
            "no space": lambda p=piece: [p.replace(b"data: ", b"data:").replace(b"\n", b"\r\n")],
        }[step["how"]]()
    return found


def _junk(piece: bytes, which: int) -> bytes:
    """An event with something else in place of one of its values."""
    try:
        value = json.loads(piece.removeprefix(b"data: "))
    except ValueError:
        return piece
    if isinstance(value, dict) and value:
        key = list(value)[which % len(value)]
        inner = value[key]
        if isinstance(inner, dict) and inner:
            inner[list(inner)[which % len(inner)]] = _JUNK[which]
        else:
            value[key] = _JUNK[which]
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _clients(case: Case, server: ScriptedServer) -> Figures:
    """Clients of the proxy side by side, then one that behaves: it gets everything."""
    proxy = Proxy(server.url, ExchangeQueue(1 << 24))
    proxy.start()
    try:
        host, port = proxy.url.removeprefix("http://").split(":")
        request = _request(server)
        threads = [
            threading.Thread(target=_behave, args=((host, int(port)), one, request))
            for one in case["clients"]
        ]
        for thread in threads:
            thread.start()
        _settled(lambda: not any(t.is_alive() for t in threads), "a client waits for ever", 20.0)
        got = _behave((host, int(port)), {"kind": "whole", "n": 0}, request)
        assert got.startswith(b"HTTP/1.1 200"), got[:200]
    finally:
        proxy.stop()
    return {"clients": len(threads)}


def _request(server: ScriptedServer) -> bytes:
    body = json.dumps(server.capture["requests"][0]["body"]).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body


def _behave(address: tuple[str, int], client: dict[str, Any], request: bytes) -> bytes:
    kind, got = client["kind"], b""
    with socket.create_connection(address, 10) as link:
        link.settimeout(10)
        try:
            if kind == "half a request":
                link.sendall(request[: client["n"] % len(request)])
                return got
            if kind == "no http":
                link.sendall(os.urandom(client["n"]))
                link.recv(100)
                return got
            if kind == "large header":
                link.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * (client["n"] << 8) + b"\r\n\r\n")
                link.recv(100)
                return got
            if kind == "idle":
                time.sleep(0.2)
                return got
            link.sendall(request)
            while more := link.recv(client["n"] if kind == "slow" else 1 << 16):
                got += more
                if kind == "gone":
                    return got
                if kind == "slow":
                    time.sleep(0.001)
        except OSError:
            assert kind != "whole"
    return got


def _n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settled(holds: Callable[[], bool], what: str, seconds: float = _OPEN_S) -> None:
    until = awake.now() + seconds
    while not holds():
        assert awake.now() < until, what
        time.sleep(0.02)


CAMPAIGN = Campaign(
    "servers",
    "A sentence, what came is kept, and no socket, file or thread is left.",
    _draw,
    _play,
    seconds=60.0,
    n_bytes=2**29,
    batch=6,
    n_least=8,
)
