"""A proxy between clients and a scripted server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.observe.proxy.exchange_queue import ExchangeQueue
from engine.observe.proxy.proxy import Proxy
from engine.observe.server.reply import ExchangeEvent
from tests.support.scripted_replies import events
from tests.support.scripted_server import ScriptedServer


def chunk(i: int, timings: bool = True) -> dict[str, Any]:
    told = {"timings": {"predicted_n": i, "predicted_ms": i * 1.5}} if timings else {}
    return {"index": 0, "content": f"wörd {i} ", "tokens": [i], "stop": False} | told


def chunks(n: int, timings: bool = True) -> list[bytes]:
    return events(*(chunk(i, timings) for i in range(1, n + 1)))


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    empty = {"requests": [], "props": {}, "models": {}, "slots": [], "extra": {}}
    with ScriptedServer(empty) as started:
        yield started


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.received.clear()
    return running


class Passing:
    """A proxy with its queue, and a client of it."""

    def __init__(self, server: str, limit: int = 2**26, **options: Any) -> None:
        self.queue = ExchangeQueue(limit)
        self.proxy = Proxy(server, self.queue, **options)
        self.proxy.start()
        # without certificates, which take 60 ms to read
        self.client = httpx.Client(
            base_url=self.proxy.url, timeout=60, trust_env=False, verify=False
        )
        self.notes: list[ExchangeEvent] = []

    def stop(self) -> None:
        self.client.close()
        self.proxy.stop()

    def until(self, what: str, n: int = 1) -> list[ExchangeEvent]:
        """All notes, once `n` of a kind are among them."""
        for _ in range(24_000):
            self.notes += self.queue.take()
            if sum(note.kind == what for note in self.notes) >= n:
                return self.notes
            time.sleep(0.01)
        raise AssertionError(f"{what} never came: {[note.kind for note in self.notes]}")

    def recorded(self, request: int = 0) -> bytes:
        return b"".join(
            note.data for note in self.notes if note.kind == "data" and note.request == request
        )


@pytest.fixture
def passing(server: ScriptedServer) -> Iterator[Passing]:
    made = Passing(server.url)
    yield made
    made.stop()


def open_files() -> int:
    """Files and sockets of this process; 0 where the system does not tell."""
    told = Path("/proc/self/fd")
    return len(list(told.iterdir())) if told.exists() else 0


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(24_000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")
