"""The queue of a proxy's traffic, from the thread that forwards it to the one that writes rows."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.observe.server.reply import ExchangeEvent, Inbox, What

LIMIT = 64 * 2**20
"""Most bytes in a queue that is not read; beyond that, requests are no longer recorded."""
_MOST_DECODED = 64 * 2**20
"""Most decompressed bytes of a response."""
_MOST_OF_A_PIECE = 4 * 2**20
"""Most decompressed bytes of one piece of it: forwarding stops while a piece is decompressed."""

FELL_BEHIND = (
    "The recording could not keep up with the traffic, and the rest of a reply is missing."
)


class ExchangeQueue:
    """A queue of events whose producer never waits; another thread reads them."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._inbox = Inbox(limit)
        self._numbers = itertools.count()
        self.n_unrecorded = 0
        """Requests that began while the queue was full."""

    def request(
        self, path: str, body: bytes, is_asked_by_us: bool, reason: str = ""
    ) -> RecordedExchange | None:
        """Start to record a request; None when there is no room for it."""
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
        """Add an event; False when there is no room. There always is room for a last event."""
        if not is_last and not self._inbox.has_room_for(event):
            return False
        self._inbox.put(event)
        return True

    def take(self) -> list[ExchangeEvent]:
        """All waiting events, in order."""
        return list(iter(partial(self._inbox.take, 0.0), None))


class RecordedExchange:
    """One request in the queue until it is done or fails. Its response is kept decompressed."""

    def __init__(self, queue: ExchangeQueue, number: int) -> None:
        self.number = number
        self._queue, self._ended = queue, False
        self._decode: Callable[[bytes], bytes] = bytes

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The response began. headers: its headers by lower-case name."""
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._decode = _decompressor()
        elif encoding != "identity":
            reason = f"The content encoding {encoding[:20]!r} of a reply is not supported."
            self.end("unrecorded", reason)
        self._put(self._event("head", status=status, headers=headers))

    def data(self, piece: bytes) -> None:
        """A piece of the response as received."""
        if self._ended:
            return
        try:
            decoded = self._decode(piece)
        except (zlib.error, OverflowError):
            self.end("unrecorded", "A reply's content encoding is wrong, or it is too large.")
            return
        self._put(self._event("data", data=decoded))

    def end(self, kind: What, reason: str = "") -> None:
        """The last event of a request: see `ExchangeEvent`. reason: one sentence."""
        if not self._ended:
            self._ended = True
            self._queue.put(self._event(kind, reason=reason), is_last=True)

    def _put(self, event: ExchangeEvent) -> None:
        if not self._ended and not self._queue.put(event):
            self.end("unrecorded", FELL_BEHIND)

    def _event(self, kind: What, **more: Any) -> ExchangeEvent:
        return ExchangeEvent(self.number, kind, time.monotonic(), **more)


def _decompressor() -> Callable[[bytes], bytes]:
    """Decompresses pieces of gzip or zlib. Raises zlib.error, and OverflowError for too much output
    and for trailing bytes."""
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
