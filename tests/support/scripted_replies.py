"""Replies of a llama-server by script: those of captures, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest

CAPTURES = Path(__file__).parents[3] / "shared" / "captures"
_HERE = Path(__file__).parents[1] / "data" / "captures"
STREAM = {"Content-Type": "text/event-stream"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
HTML = {"Content-Type": "text/html"}


@dataclass(frozen=True)
class Pause:
    """Nothing comes for this many seconds."""

    seconds: float


class Hold:
    """Nothing comes until `release`; `reached` says that what lies before was sent."""

    def __init__(self) -> None:
        self.reached, self._go = threading.Event(), threading.Event()

    def release(self) -> None:
        """Go on."""
        self._go.set()

    async def wait(self) -> None:
        """Wait for `release` without holding up other requests."""
        self.reached.set()
        while not self._go.is_set():
            await asyncio.sleep(0.005)


class Cut:
    """The connection breaks here, without the end of the reply."""


Step = bytes | Pause | Hold | Cut


@dataclass(frozen=True)
class Reply:
    """What one request is answered with: bytes in the pieces in which they are sent."""

    body: Sequence[Step] | bytes = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(STREAM))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The body as a sequence."""
        return (self.body,) if isinstance(self.body, bytes) else tuple(self.body)


@dataclass(frozen=True)
class Raw:
    """What one request is answered with, head included, as the bytes of the connection: pieces,
    which may have no end. After the last one the connection stays open."""

    pieces: Callable[[], Iterable[Step]]


OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\n\r\n"
"""The head of a stream that ends with its connection."""


def dripped(data: bytes, start: bytes = b"", seconds: float = 0.02) -> Raw:
    """First the start, then the same bytes again and again, one at a time."""
    steps = [step for value in data for step in (bytes([value]), Pause(seconds))]
    return Raw(lambda: chain([start], cycle(steps)))


def endless(data: bytes, start: bytes = b"") -> Raw:
    """First the start, then the same bytes as fast as they are taken."""
    return Raw(lambda: chain([start], repeat(data)))


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply of one JSON value."""
    return Reply(json.dumps(value).encode(), status, JSON)


def error_reply(status: int, message: str, kind: str = "server_error", **more: Any) -> Reply:
    """An error as llama-server tells it."""
    return json_reply({"error": {"code": status, "message": message, "type": kind, **more}}, status)


LOADING = error_reply(503, "Loading model", "unavailable_error")
UNAUTHORIZED = error_reply(401, "Invalid API Key", "authentication_error")
NO_METRICS = error_reply(
    501, "This server does not support metrics endpoint. Start it with `--metrics`", "not_supported"
)
WEB_PAGE = Reply(b"<!doctype html><html><body><h1>It works!</h1></body></html>", 200, HTML)
NOT_JSON = Reply(b'{"content": "hal', 200, JSON)


def read_capture(name: str | Path) -> dict[str, Any]:
    """A capture by its name or path."""
    path = Path(name)
    if not path.suffix:
        inside = _HERE / f"{name}.json.gz"
        path = inside if inside.exists() else CAPTURES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"the capture {path.name} is not here")
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def stream(request: dict[str, Any]) -> list[bytes]:
    """A captured request's reply, one piece per event, or its whole body."""
    reply = request["reply"]
    if "events" not in reply:
        return [reply["body"].encode()]
    return [f"{lines}\n\n".encode() for _, lines in reply["events"]]


def events(*values: Any) -> list[bytes]:
    """Values as server-sent events."""
    return [f"data: {json.dumps(value)}\n\n".encode() for value in values]


def token_events(n: int, start: int = 0) -> list[bytes]:
    """This many tokens of /completion, one each: in every round three are drafted, two accepted."""
    found = []
    for i in range(start, start + n):
        rounds = (i + 2) // 3
        timings = {"cache_n": 0, "prompt_n": 10, "prompt_ms": 12.5, "predicted_n": i + 1}
        timings |= {"predicted_ms": 0.5 * rounds + 0.001}
        if rounds:
            timings |= {"draft_n": 3 * rounds, "draft_n_accepted": 2 * rounds}
        found.append({"index": 0, "content": f" {i % 997}", "tokens": [i % 997], "stop": False})
        found[-1]["timings"] = timings
    return events(*found)


def token_flood() -> Iterator[bytes]:
    """A raw reply of token after token, as fast as they are taken."""
    yield EVENTS
    for start in count(0, 400):
        yield b"".join(token_events(400, start))


def changed(pieces: Iterable[bytes], change: Callable[[int, Any], Any]) -> list[bytes]:
    """A stream whose JSON events are what `change` makes of their number and value."""
    made = []
    for i, piece in enumerate(pieces):
        try:
            value = json.loads(piece.removeprefix(b"data: "))
        except ValueError:
            made.append(piece)
        else:
            made += events(change(i, value))
    return made


def without_timings(pieces: Iterable[bytes]) -> list[bytes]:
    """A stream of a server that does not know `timings_per_token`: only the end has timings."""

    def change(_: int, event: Any) -> Any:
        if isinstance(event, dict) and not event.get("stop"):
            event.pop("timings", None)
        return event

    return changed(pieces, change)


def backwards(pieces: Iterable[bytes], at: int) -> list[bytes]:
    """A stream whose `draft_n` falls to 1 at an event."""

    def change(i: int, event: Any) -> Any:
        if i == at:
            event["timings"] |= {"draft_n": 1, "draft_n_accepted": 0}
        return event

    return changed(pieces, change)


def halved(pieces: Sequence[bytes]) -> list[bytes]:
    """The same bytes, every piece cut in its middle: no event comes whole."""
    whole = b"".join(pieces)
    marks = [0]
    for piece in pieces:
        marks += [marks[-1] + len(piece)]
    cuts = [(a + b) // 2 for a, b in pairwise(marks)]
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def cut(pieces: Sequence[bytes], n_events: int) -> list[Step]:
    """This many events, half of the next one, and the connection breaks."""
    after = pieces[n_events]
    return [*pieces[:n_events], after[: len(after) // 2], Cut()]


def server_error(pieces: Sequence[bytes], n_events: int, message: str) -> list[bytes]:
    """This many events, then an error inside the stream, which is its end."""
    return [*pieces[:n_events], *events({"error": {"code": 500, "message": message}})]
