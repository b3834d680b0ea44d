"""Ctrl-C and its like while anything goes on: it ends, and what was recorded is there."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from engine.trace.reopen import open_trace
from tests.support.golden_files import DATA
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.commands import said_by
from tests.torture.log_steps import unpacked
from tests.torture.raw_server import Asked, RawServer, chunk, reply
from tests.torture.signalled import NOT_HEARD, Signalled

_M = str(DATA / "qwen35-c-v2x-mtp-f32.gguf")
_SIGNALS = ("SIGINT", "SIGINT", "SIGTERM", "SIGHUP")
_DRAFT = ["--spec-type", "draft-mtp"]
_LONG = ["-p", "x y", "-n", "3000", "-c", "4096", "--ignore-eos"]
_LONGEST_S = 6.0
"""How long a command runs before it gets its signal in any case."""
_BEHAVIOURS = (
    "fast",
    "burst",
    "drip",
    "silent within",
    "deaf",
    "never closes",
    "continue",
    "headers",
    "slow head",
    "silent",
    "large lines",
    "no line ends",
    "other kind",
)
_WITHOUT_TOKENS = ("continue", "headers", "slow head", "silent", "other kind")
"""The behaviours that never send a token."""
_RECORDED = ("run", "turns", "compare", "run", "turns", "import")
"""Commands that write a trace, in turn, and the others."""
_OTHERS = ("bench", "match", "tune", "fidelity", "sweep")
_EVENTS = {"run": ("bytes of out", 2000), "bench": ("lines of err", 4)}
"""What decoding commands do often, and how often at most, before the signal comes; else it is
milliseconds of processor time."""
_QUESTIONS = ("/props", "/v1/models", "/slots", "/metrics", "/tokenize")
_CLIENTS = ("reads", "does not read", "idle", "half a request", "drips", "gone")


def _draw(random: np.random.Generator, number: int) -> Case:
    doing = ("observe", "decode", "listen", "decode")[number % 4]
    case: Case = {
        "doing": doing,
        "signal": str(random.choice(_SIGNALS)),
        "twice": bool(random.random() < 0.15),
        "json": bool(random.random() < 0.2),
    }
    which = number // 4
    if doing == "decode":
        names = _RECORDED if number % 4 == 1 else _OTHERS
        name = names[which % len(names)]
        event = _EVENTS.get(name, ("cpu", 1500)) if random.random() < 0.7 else ("cpu", 1500)
        return case | {"command": name, "wait": [event[0], int(random.integers(1, event[1] + 1))]}
    served = _BEHAVIOURS[(2 * which + number // 2 % 2) % len(_BEHAVIOURS)]
    case |= {"served": served, "of": "/completion", "n_prompts": int(random.choice([1, 1, 2, 3]))}
    if random.random() < 0.3:
        case |= {"of": str(random.choice(_QUESTIONS))}
    if doing == "listen":
        n = int(random.integers(1, 5))
        case |= {"clients": [str(random.choice(_CLIENTS)) for _ in range(n)], "of": "/completion"}
    events = [("sent", 400), ("sent", 40), ("requests", 4), ("bytes of out", 300)]
    event = events[int(random.integers(len(events)))]
    return case | {"wait": [event[0], int(random.integers(1, event[1] + 1))]}


class _Server:
    """What the program talks to: its answers to one path are as a case has it, and of an endless
    reply it counts the pieces as `sent`."""

    def __init__(self, case: Case, happened: Callable[[str], None]) -> None:
        self._case, self._happened = case, happened
        self.n_events = 0
        self.raw = RawServer(self._answer)

    def _answer(self, asked: Asked, link: socket.socket) -> None:
        self._happened("requests")
        if asked.path.split("?")[0] == self._case["of"]:
            with suppress(OSError):
                getattr(self, "_" + self._case["served"].replace(" ", "_"))(link)
        elif asked.path == "/completion":
            link.sendall(reply(b"".join(map(_event, range(40))), "text/event-stream"))
            self.n_events += 40
        elif asked.path == "/props":
            facts = {"default_generation_settings": {"n_ctx": 64}, "total_slots": 1}
            link.sendall(reply(json.dumps(facts).encode()))
        else:
            link.sendall(reply(b"{}", status="404 Not Found"))

    def _send(self, link: socket.socket, piece: bytes) -> None:
        link.sendall(piece)
        self._happened("sent")

    def _begin(self, link: socket.socket, kind: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        link.sendall(head.encode())

    def _events(self, link: socket.socket, n: int, pause_s: float = 0.0) -> None:
        for i in range(n):
            self._send(link, chunk(_event(i)))
            self.n_events += 1
            time.sleep(pause_s)

    def _fast(self, link: socket.socket) -> None:
        self._begin(link)
        while True:
            self._send(link, chunk(b"".join(map(_event, range(50)))))
            self.n_events += 50

    def _burst(self, link: socket.socket) -> None:
        """As much as the connection takes at once."""
        self._begin(link)
        link.sendall(chunk(b"".join(_event(i) for i in range(20_000))))
        self.n_events += 20_000
        self._events(link, 10_000, 0.002)

    def _drip(self, link: socket.socket) -> None:
        self._begin(link)
        self._events(link, 3)
        for i in range(10_000):
            for byte in _event(3 + i):
                self._send(link, chunk(bytes([byte])))
                time.sleep(0.005)

    def _silent_within(self, link: socket.socket) -> None:
        self._begin(link)
        self._events(link, 30)
        self._wait_for_client(link)

    def _wait_for_client(self, link: socket.socket) -> None:
        for _ in range(6000):
            self._happened("sent")
            time.sleep(0.01)

    def _deaf(self, link: socket.socket) -> None:
        """Goes on whatever the client does, and leaves the connection open."""
        self._begin(link)
        for i in range(10_000):
            with suppress(OSError):
                self._send(link, chunk(_event(i)))
            self.n_events += 1
            time.sleep(0.002)

    def _never_closes(self, link: socket.socket) -> None:
        self._begin(link)
        self._events(link, 20)
        end = {"content": "", "stop": True, "stop_type": "limit"}
        link.sendall(chunk(f"data: {json.dumps(end)}\n\n".encode()))
        for _ in range(10_000):
            self._send(link, chunk(b": ping\n\n"))
            time.sleep(0.005)

    def _continue(self, link: socket.socket) -> None:
        while True:
            self._send(link, b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.001)

    def _headers(self, link: socket.socket) -> None:
        link.sendall(b"HTTP/1.1 200 OK\r\n")
        for i in range(100_000):
            self._send(link, b"X-%d: y\r\n" % i)
            time.sleep(0.005)

    def _slow_head(self, link: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" * 50:
            self._send(link, bytes([byte]))
            time.sleep(0.05)

    def _silent(self, link: socket.socket) -> None:
        self._wait_for_client(link)

    def _large_lines(self, link: socket.socket) -> None:
        self._begin(link)
        for i in range(1 << 20):
            self._send(link, chunk(_event(i, "x" * 500_000)))
            self.n_events += 1

    def _no_line_ends(self, link: socket.socket) -> None:
        self._begin(link)
        self._events(link, 5)
        while True:
            self._send(link, chunk(b"data: " + b"x" * 60_000))

    def _other_kind(self, link: socket.socket) -> None:
        self._begin(link, "text/html")
        while True:
            self._send(link, chunk(b"<p>" * 1000))
            time.sleep(0.002)


def _event(i: int, more: str = "") -> bytes:
    """A token of a stream whose rounds draft two and accept one; the first is the prompt's."""
    n_rounds = (i + 1) // 2
    timings = {"prompt_n": 1, "prompt_ms": 1.0, "predicted_n": i + 1}
    timings |= {"cache_n": 0, "predicted_ms": 0.001 + 10.0 * n_rounds}
    if n_rounds:
        timings |= {"draft_n": 2 * n_rounds, "draft_n_accepted": n_rounds}
    event = {"content": f" {i}{more}", "tokens": [i % 384], "stop": False, "timings": timings}
    return f"data: {json.dumps(event)}\n\n".encode()


def _play(case: Case, folder: Path) -> Figures:
    os.chdir(folder)
    number = getattr(signal, case["signal"])
    words, trace = _words(case, folder)
    wait = (case["wait"][0], case["wait"][1])
    command = Signalled([], number, wait, case["twice"])
    server = _Server(case, command.happened) if "served" in case else None
    url = server.raw.url if server else ""
    command.words = [url if word == "URL" else word for word in words]
    command.fork()
    if server:
        server.raw.start()
    command.start()
    clients = _Clients(case, command) if "clients" in case else None
    try:
        status = command.status(_LONGEST_S, clients.look if clients else lambda: None)
    finally:
        if server:
            server.raw.stop()
    said = bytes(command.err).decode("utf-8", "replace")
    assert "Traceback" not in said, said[-1500:]
    figures: Figures = {case["doing"]: 1, "signalled": command.was_sent.is_set()}
    if status == NOT_HEARD:
        return figures | {"not_heard": 1}
    good = {128 + number}
    if case["twice"]:
        good |= {-number}
    if "clients" in case and number == signal.SIGINT:
        good |= {0}  # Ctrl-C is how listening ends
    if not command.was_sent.is_set() or "clients" not in case:
        good |= {0, 1}  # it was through, or the server has refused before
    assert status in good, f"status {status}: {said[-600:]}"
    ended = status in (128 + number, 0)
    if trace.exists():
        store = open_trace(trace)
        figures["tokens"] = len(store.tokens)
        for run_id, facts in store.runs.items():
            assert "stops" in facts, f"run {run_id} of the trace has no end"
        assert len(store.tokens) or not _must_have(case, command), "the trace has no token"
    elif not case["twice"] and ended:
        listened = "clients" in case and b" are forwarded to " in command.err
        assert not listened and not _must_have(case, command), (
            f"what was recorded is not exported: {said[-600:]}"
        )
    return figures | {"ended": ended, "traces": trace.exists()}


def _must_have(case: Case, command: Signalled) -> bool:
    """Whether something had been recorded when the signal came."""
    if "clients" in case or case["json"] or case.get("command", "run") not in ("run", "compare"):
        return False
    if case.get("of") == "/completion" and case.get("served") in _WITHOUT_TOKENS:
        return False  # what it writes is a warning
    return command.n_out > 100


class _Clients:
    """Programs that talk to the server through the program."""

    def __init__(self, case: Case, command: Signalled) -> None:
        self._case, self._command, self._have_come = case, command, False

    def look(self) -> None:
        """Let them come once the program says where it listens."""
        said = bytes(self._command.err)
        if self._have_come or b" goes to " not in said:
            return
        self._have_come = True
        address = said.split(b"http://")[1].split(b" ")[0].decode().split(":")
        for kind in self._case["clients"]:
            args = ((address[0], int(address[1])), kind)
            threading.Thread(target=self._talk, args=args, daemon=True).start()

    def _talk(self, address: tuple[str, int], kind: str) -> None:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with suppress(OSError), socket.create_connection(address, 30) as link:
            if kind == "half a request":
                request = request[:-9]
            for i in range(0, len(request), 1 if kind == "drips" else len(request)):
                link.sendall(request[i : i + 1] if kind == "drips" else request)
                time.sleep(0.01 if kind == "drips" else 0)
            if kind == "gone":
                return
            while kind == "reads" and (more := link.recv(1 << 16)):
                self._command.happened("bytes of out", len(more))
            self._command.was_sent.wait(60)
            time.sleep(1)


def _words(case: Case, folder: Path) -> tuple[list[str], Path]:
    trace = folder / "t"
    if case["doing"] == "decode":
        words = [word.replace("OUT", str(trace)) for word in _COMMANDS[case["command"]]()]
        return words, trace if str(trace) in words else folder / "none"
    words = ["observe", "URL", "--trace", str(trace)] + ["--json"] * case["json"]
    if "clients" in case:
        return [*words, "--listen", "127.0.0.1:0"], trace
    return words + ["-p", "x"] * case["n_prompts"] + ["-n", "100000"], trace


@cache
def _files() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="draftscope-torture-stopping-"))
    prompts = [{"name": f"p{i}", "text": "x y"} for i in range(9)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "turns.json").write_text(json.dumps(["x y"] * 50))
    log = unpacked("verbose-plain.log").decode()
    many = (
        log.replace("task 2 ", f"task {i} ").replace("task 0 ", f"task {i} ") for i in range(400)
    )
    (folder / "large.log").write_text("".join(many))
    (folder / "plan.toml").write_text(
        f'title = "t"\n[settings]\nmodel = "{_M}"\nprompt = "x"\nn-predict = 500\n'
        "ignore-eos = true\n[grid]\nseed = [1, 2, 3, 4, 5, 6]\n"
    )
    return folder


def _prompts() -> list[str]:
    return ["--prompts", str(_files() / "prompts.json")]


_COMMANDS: dict[str, Callable[[], list[str]]] = {
    "run": lambda: ["run", _M, *_LONG, *_DRAFT, "--trace", "OUT"],
    "compare": lambda: ["compare", _M, *_LONG, *_DRAFT, "--trace", "OUT"],
    "turns": lambda: [
        *("run", _M, "-n", "60", "--turns", str(_files() / "turns.json"), "--trace", "OUT")
    ],
    "bench": lambda: ["bench", _M, "-n", "800", "--ignore-eos", *_DRAFT, *_prompts()],
    "import": lambda: ["import", str(_files() / "large.log"), "--trace", "OUT"],
    "match": lambda: ["match", _M, "-n", "800", *_prompts()],
    "tune": lambda: ["tune", _M, "-n", "400", *_DRAFT, "--ignore-eos", *_prompts()],
    "fidelity": lambda: ["fidelity", _M, "-p", "x", "-n", "1500"],
    "sweep": lambda: ["sweep", str(_files() / "plan.toml"), "--out", "OUT.sweep"],
}


def _prepare() -> None:
    _files()
    said_by(["run", _M, "-n", "6", "-p", "x", *_DRAFT]).check(0)
    import httpx  # noqa: F401
    import uvicorn  # noqa: F401

    import app.cli.observe  # noqa: F401
    import engine.observe.proxy.proxy_run
    import engine.observe.server.server_run  # noqa: F401


CAMPAIGN = Campaign(
    "stopping",
    "It ends soon with the status of the signal, and exports what was recorded.",
    _draw,
    _play,
    _prepare,
    seconds=90.0,
    n_bytes=2**30,
    batch=6,
    n_least=8,
)
