"""What arrives of requests to a server, from the thread that reads to the thread that records."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

from engine.errors import ServerError

_INBOX_BYTES = 2**20
_OVERHEAD = 256
"""Bytes that an arrival takes besides its data."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What happened to a request. at: `time.perf_counter` of it, seconds.

    head: the reply began (status, headers). data: a piece of its body. lost: the connection broke
    and is looked for again (reason). resumed: it was found. done: the reply ended by itself.
    broke: it was cut short or refused (reason: one sentence; error, where there is a better word
    for it than the sentence alone).
    """

    request: int
    kind: Literal["head", "data", "lost", "resumed", "done", "broke"]
    at: float
    data: bytes = b""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    error: ServerError | None = None


class Inbox:
    """Arrivals of any number of requests. One thread takes them; as long as it does not, and 1 MiB
    waits, the client reads no further, and so the server waits too."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be read for now."""
        return self._waiting >= _INBOX_BYTES

    @property
    def n_waiting(self) -> int:
        """Arrivals that were put and not taken."""
        return self._arrivals.qsize()

    def put(self, arrival: Arrival) -> None:
        """Add one."""
        with self._lock:
            self._waiting += len(arrival.data) + _OVERHEAD
        self._arrivals.put(arrival)

    def take(self, seconds: float) -> Arrival | None:
        """The next one, waiting so long for it; None if none came."""
        try:
            arrival = self._arrivals.get(timeout=seconds) if seconds > 0 else None
            arrival = arrival or self._arrivals.get_nowait()
        except Empty:
            return None
        with self._lock:
            self._waiting -= len(arrival.data) + _OVERHEAD
        return arrival
