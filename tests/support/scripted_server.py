"""A llama-server by script: a real server on the loopback that replays captures, or misbehaves.

with ScriptedServer("mtp") as server:                    # a capture of ../shared/captures
    server.script("/completion", Reply(cut(stream(server.capture["requests"][0]), 9)))
    … talk to server.url …
    assert server.received[-1].json["stream"]
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from tests.support.scripted_replies import (
    JSON,
    LOADING,
    STREAM,
    UNAUTHORIZED,
    Cut,
    Hold,
    Pause,
    Raw,
    Reply,
    error_reply,
    json_reply,
    read_capture,
    stream,
)


@dataclass
class Received:
    """A request as it came. left: set once the client has closed before the end of the reply."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    left: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    n_sent: int = 0
    """Bytes of a raw reply."""

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


_TURNS = 4
"""Of the event loop, in which a connection that was accepted becomes one of the server: asyncio
leaves the socket open where its server is closed before."""


class ScriptedServer:
    """A server on a port of its own. received: all requests, in order of arrival.

    capture: its facts, counters and replies are served; name or content. key: without it as a
    bearer token everything but /health is 401. loading: this many requests are answered with 503
    first. pace: seconds before every piece of a stream.
    """

    def __init__(
        self,
        capture: str | Path | dict[str, Any] | None = None,
        *,
        key: str | None = None,
        loading: int = 0,
        pace: float = 0.0,
    ) -> None:
        self.capture = capture if isinstance(capture, dict) else read_capture(capture or "mtp")
        self.key, self.loading, self.pace = key, loading, pace
        self.received: list[Received] = []
        self.counters: Counter[str] = Counter()
        """What /metrics says of the streams that were sent, by llama-server's names."""
        self.n_starts = 0
        self._scripts: dict[str, list[Reply | Raw]] = {}
        self._served: Counter[int] = Counter()
        self._kept: dict[str, bytes] = {}  # replies by X-Conversation-Id
        self._lock = threading.Lock()
        self._port = 0
        self._start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def script(self, path: str, *replies: Reply | Raw) -> None:
        """Answer the next requests of this path so, one reply each, then as before."""
        with self._lock:
            self._scripts.setdefault(path, []).extend(replies)

    def of(self, path: str) -> list[Received]:
        """The requests of a path so far."""
        return [one for one in self.received if one.path == path]

    def kill(self) -> None:
        """Break all connections and listen no more."""
        self._stop()

    def restart(self) -> None:
        """As a server that is ended and started again on the same port: its counters are 0."""
        self._kept.clear()
        self._stop()
        self.counters.clear()
        self._start()

    def stop(self) -> None:
        """End it."""
        self._stop()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.n_starts += 1
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self._port))
        self._socket.listen(64)  # connections wait from now on, whenever the thread is ready
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level=100,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted server", daemon=True)
        self._thread.start()
        self._ready.wait(60)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def _stop(self) -> None:
        async def break_off() -> None:
            self._loop.remove_reader(self._socket)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            for listening in self._server.servers:
                listening.close()
            for connection in list(self._server.server_state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
            self._server.should_exit = self._server.force_exit = True

        with suppress(RuntimeError):  # it has ended before
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(break_off()))
        self._thread.join(60)
        self._socket.close()

    async def _app(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        query = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode()).items()}
        request = Received(scope["method"], scope["path"], query, headers)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request.body = bytes(body)
        with self._lock:
            self.received.append(request)
        reply = self._reply(request)
        if isinstance(reply, Raw):
            await self._send_raw(reply, request, scope, receive)
            return
        left = asyncio.ensure_future(self._watch(receive, request))
        try:
            await self._send(reply, request, send)
        finally:
            left.cancel()

    async def _send_raw(
        self,
        reply: Raw,
        request: Received,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
    ) -> None:
        """Past uvicorn, which would send nothing but HTTP."""
        (connection,) = (
            one for one in self._server.server_state.connections if one.client == scope["client"]
        )
        left = asyncio.ensure_future(self._watch(receive, request))
        try:
            for step in reply.pieces():
                if request.left.is_set():
                    return
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Hold):
                    await step.wait()
                elif isinstance(step, bytes):
                    connection.transport.write(step)
                    request.n_sent += len(step)
                    await asyncio.sleep(0)
                    await connection.flow.drain()
            await left
        finally:
            left.cancel()
            connection.transport.abort()

    async def _watch(self, receive: Callable[[], Awaitable[Any]], request: Received) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not request.answered.is_set():
            request.left.set()

    async def _send(
        self,
        reply: Reply,
        request: Received,
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in reply.headers.items()]
        streams = reply.headers.get("Content-Type") == STREAM["Content-Type"]
        if not streams:
            length = sum(len(step) for step in reply.steps if isinstance(step, bytes))
            raw.append((b"content-length", str(length).encode()))
        start = {"type": "http.response.start", "status": reply.status, "headers": raw}
        await send(start)
        for step in reply.steps:
            if request.left.is_set():
                return
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, Hold):
                await step.wait()
            elif isinstance(step, Cut):
                request.answered.set()
                raise ConnectionAbortedError("cut by the script")
            else:
                if streams and self.pace:
                    await asyncio.sleep(self.pace)
                await send({"type": "http.response.body", "body": step, "more_body": True})
        request.answered.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _reply(self, request: Received) -> Reply | Raw:
        with self._lock:
            if request.path == "/health" and not self._scripts.get("/health"):
                return (
                    LOADING if self.loading > 0 and self._take() else json_reply({"status": "ok"})
                )
            if self.loading > 0 and self._take():
                return LOADING
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return UNAUTHORIZED
            if waiting := self._scripts.get(request.path):
                reply = waiting.pop(0)
                return reply if isinstance(reply, Raw) else self._counted(reply, request)
        slots = "slots_after" if self._served else "slots"
        facts = {"/props": "props", "/v1/models": "models", "/slots": slots}
        if request.path in facts:
            return json_reply(self.capture[facts[request.path]])
        if request.path == "/metrics":
            return self._metrics()
        if request.path == "/v1/stream":
            return self._replay(request)
        if request.method == "POST" and (found := self._captured(request)) is not None:
            reply = found["reply"]
            kind = STREAM if "events" in reply else JSON
            return self._counted(Reply(stream(found), reply["status"], dict(kind)), request)
        if request.path in self.capture["extra"]:
            return Reply(self.capture["extra"][request.path].encode(), 200, JSON)
        return error_reply(404, "File Not Found", "not_found_error")

    def _take(self) -> bool:
        self.loading -= 1
        return True

    def _captured(self, request: Received) -> dict[str, Any] | None:
        """The captured request for this one: of the same path and prompt, the least served."""
        try:
            body = request.json
        except ValueError:
            return None
        asked = body.get("prompt", body.get("messages")) if isinstance(body, dict) else None
        same_path = [
            (i, one)
            for i, one in enumerate(self.capture["requests"])
            if one["path"] == request.path
        ]
        same = [
            (i, one)
            for i, one in same_path
            if one["body"].get("prompt", one["body"].get("messages")) == asked
        ]
        streams = bool(body.get("stream"))
        alike = [(i, one) for i, one in same or same_path if ("events" in one["reply"]) == streams]
        candidates = alike or same or same_path
        if not candidates:
            return None
        with self._lock:
            i, found = min(candidates, key=lambda pair: self._served[pair[0]])
            self._served[i] += 1
        return found

    def _counted(self, reply: Reply, request: Received) -> Reply:
        """The reply, noted for /metrics and under its conversation's name."""
        whole = b"".join(step for step in reply.steps if isinstance(step, bytes))
        if name := request.headers.get("x-conversation-id"):
            self._kept[name] = whole
        drafts = drafted = 0
        last: dict[str, Any] = {}
        for timings in _timings(whole):
            drafts += timings.get("draft_n", 0) > drafted
            drafted, last = max(drafted, timings.get("draft_n", 0)), timings
        self.counters.update(
            {
                "prompt_tokens_total": last.get("prompt_n", 0),
                "tokens_predicted_total": last.get("predicted_n", 0),
                "spec_decode_num_drafts_total": drafts,
                "spec_decode_num_draft_tokens_total": last.get("draft_n", 0),
                "spec_decode_num_accepted_tokens_total": last.get("draft_n_accepted", 0),
            }
        )
        return reply

    def _metrics(self) -> Reply:
        lines = []
        for name, value in self.counters.items():
            lines += [f"# TYPE llamacpp:{name} counter", f"llamacpp:{name} {value}"]
        headers = {"Content-Type": "text/plain; version=0.0.4"}
        headers["Process-Start-Time-Unix"] = str(1000 + self.n_starts)
        return Reply("".join(f"{line}\n" for line in lines).encode(), 200, headers)

    def _replay(self, request: Received) -> Reply:
        """GET /v1/stream: the kept bytes of a conversation, from an offset on."""
        kept = self._kept.get(request.query.get("conv_id", ""))
        if kept is None:
            return error_reply(404, "Stream not found", "not_found_error")
        return Reply([kept[int(request.query.get("from", "0")) :]])


def _timings(body: bytes) -> Iterator[dict[str, Any]]:
    for line in re.split(rb"\r?\n", body):
        with suppress(ValueError, RecursionError):
            value = json.loads(line.removeprefix(b"data: "))
            if isinstance(value, dict) and isinstance(value.get("timings"), dict):
                yield value["timings"]
