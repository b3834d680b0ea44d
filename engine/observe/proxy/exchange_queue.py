"""What passed a proxy, on its way from the thread that passes it on to the one that writes rows."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping

from engine.observe.server.reply import ExchangeEvent

LIMIT = 64 * 2**20
"""Bytes of a queue that is not read, before requests are recorded no more."""
_MOST_DECODED = 64 * 2**20
"""Bytes that a compressed reply may become."""
_MOST_OF_A_PIECE = 4 * 2**20
"""The same of one piece of it: no other bytes pass while it is decoded."""
_OVERHEAD = 512
"""Bytes that an event costs in addition to its data."""

FELL_BEHIND = (
    "The recording could not keep up with what passed, and the rest of a reply is missing."
)


class ExchangeQueue:
    """Takes events from one thread without ever making it wait; another one reads them."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._events: deque[ExchangeEvent] = deque()
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.n_unrecorded = 0
        """Requests that began while the queue was full."""

    def request(
        self, path: str, body: bytes, is_asked_by_us: bool, reason: str = ""
    ) -> RecordedExchange | None:
        """Begin with a request; None when there is no room for it."""
        number = next(self._numbers)
        event = ExchangeEvent(
            number,
            "request",
            time.monotonic(),
            body,
            reason=reason,
            path=path,
            is_asked_by_us=is_asked_by_us,
        )
        if self.put(event):
            return RecordedExchange(self, number)
        self.n_unrecorded += 1
        return None

    def put(self, event: ExchangeEvent, is_last: bool = False) -> bool:
        """Add an event; False when there is no room for it, as there always is for a last one."""
        size = _OVERHEAD + len(event.data)
        with self._lock:
            if not is_last and self._n_bytes + size > self._limit:
                return False
            self._events.append(event)
            self._n_bytes += size
            return True

    def take(self) -> list[ExchangeEvent]:
        """All events that are waiting, in order."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._n_bytes = 0
            return events


class RecordedExchange:
    """One request in the queue, until it is done or broke. A reply is kept as it was decoded."""

    def __init__(self, queue: ExchangeQueue, number: int) -> None:
        self.number = number
        self._queue, self._ended = queue, False
        self._decode: Callable[[bytes], bytes] = bytes

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The reply began. headers: of the reply, by their names in lower case."""
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._decode = _decompressor()
        elif encoding != "identity":
            self._give_up(f"A reply is compressed as {encoding[:20]!r}, which is not known here.")
        self._put(
            ExchangeEvent(self.number, "head", time.monotonic(), status=status, headers=headers)
        )

    def data(self, piece: bytes) -> None:
        """A piece of the reply as it came."""
        if self._ended:
            return
        try:
            decoded = self._decode(piece)
        except (zlib.error, OverflowError):
            self._give_up("A reply is not compressed as it says, or too much.")
            return
        self._put(ExchangeEvent(self.number, "data", time.monotonic(), decoded))

    def done(self) -> None:
        """The reply ended by itself."""
        self._end(ExchangeEvent(self.number, "done", time.monotonic()))

    def broke(self, reason: str) -> None:
        """The reply ends here. reason: one sentence."""
        self._end(ExchangeEvent(self.number, "broke", time.monotonic(), reason=reason))

    def left(self) -> None:
        """The client no longer waits for the rest of the reply."""
        self._end(ExchangeEvent(self.number, "left", time.monotonic()))

    def _put(self, event: ExchangeEvent) -> None:
        if not self._ended and not self._queue.put(event):
            self._give_up(FELL_BEHIND)

    def _give_up(self, reason: str) -> None:
        self._end(ExchangeEvent(self.number, "unrecorded", time.monotonic(), reason=reason))

    def _end(self, event: ExchangeEvent) -> None:
        if not self._ended:
            self._ended = True
            self._queue.put(event, is_last=True)


def _decompressor() -> Callable[[bytes], bytes]:
    """Decodes pieces of gzip or zlib. Raises zlib.error, and OverflowError for too much and for
    bytes after the end."""
    decoder = zlib.decompressobj(32 + zlib.MAX_WBITS)
    room = _MOST_DECODED

    def decode(piece: bytes) -> bytes:
        nonlocal room
        decoded = decoder.decompress(piece, _MOST_OF_A_PIECE)
        room -= len(decoded)
        if decoder.unconsumed_tail or decoder.unused_data or room < 0:
            raise OverflowError
        return decoded

    return decode
