"""What was sent to a server and came back, as it was, kept in memory up to a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 64 << 20
"""Kept of one run; what follows is not kept."""
_OVERHEAD = 64


@dataclass(slots=True)
class RawRequest:
    """One request and its reply. pieces: of the body, with the time of their arrival. Times are
    milliseconds since the run began. is_whole: nothing was left out for want of room."""

    path: str
    body: Mapping[str, Any]
    sent_ms: float
    head_ms: float = 0.0
    done_ms: float = 0.0
    status: int = 0
    content_type: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    has_left: bool = False
    broke: str = ""
    is_whole: bool = True


class RawStore:
    """The requests of a run and the log beside them, up to MOST_BYTES together."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.requests: list[RawRequest] = []
        self.log: list[str] = []
        self.metrics: tuple[str, str] | None = None
        self._room = most_bytes

    @property
    def is_whole(self) -> bool:
        """Whether everything was kept."""
        return self._room >= 0

    def request(
        self, path: str, body: Mapping[str, Any], size: int, at_ms: float
    ) -> RawRequest | None:
        """A request was sent. size: of its body in bytes. None where there is no room for it."""
        if not self._take(size):
            return None
        found = RawRequest(path, body, at_ms, at_ms, at_ms)
        self.requests.append(found)
        return found

    def data(self, request: RawRequest, piece: bytes, at_ms: float) -> None:
        """A piece of a reply's body."""
        if request.is_whole and self._take(len(piece)):
            request.pieces.append((at_ms, piece))
        else:
            request.is_whole = False

    def add_log(self, text: str) -> None:
        """More of the log."""
        if self._take(len(text)):
            self.log.append(text)

    def _take(self, size: int) -> bool:
        """Whether there is room. Once there was none, nothing more is kept, so that what is kept
        has no gaps."""
        if self._room >= 0:
            self._room -= size + _OVERHEAD
        return self._room >= 0
