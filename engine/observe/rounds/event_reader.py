"""Events of a server's reply, out of bytes cut anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.observe.rounds.stream import Chunk, UnreadableError, chunks, read_json

MOST_LINE_BYTES = 16 << 20
"""A longer line, or a longer reply in one piece, is not read."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """A stream of server-sent events or of lines of JSON, or a JSON reply in one piece.

    n_events: events with data that came as a whole; neither comments nor pings count.
    """

    def __init__(self, content_type: str = "") -> None:
        """content_type: of the reply; where it is empty the first bytes decide."""
        self.n_events = 0
        self._parts: list[bytes] = []
        self._n_rest = self._n_event = 0
        self._data: list[bytes] = []
        self._is_stream: bool | None = None
        self._is_lines = "ndjson" in content_type or "jsonl" in content_type
        if "event-stream" in content_type or self._is_lines:
            self._is_stream = True
        elif "json" in content_type:
            self._is_stream = False

    def feed(self, piece: bytes) -> Iterator[Chunk]:
        """The chunks that these bytes complete. Raises UnreadableError, after those before it."""
        if self._is_stream is None and (start := piece.lstrip()):
            self._is_stream = not start.startswith((b"{", b"["))
        is_held = bool(self._parts) and self._parts[-1].endswith(b"\r")
        self._parts.append(piece)
        self._n_rest += len(piece)
        if self._is_stream is False or not (is_held or b"\n" in piece or b"\r" in piece):
            if self._n_rest > MOST_LINE_BYTES:
                what = "a line" if self._is_stream else "a reply"
                raise UnreadableError(f"sent {what} of more than {MOST_LINE_BYTES >> 20} MiB")
            return
        data = b"".join(self._parts)
        held = data.endswith(b"\r")  # its "\n" may come with the next piece
        if b"\r" in data:
            data = _LINE_END.sub(b"\n", data[:-1] if held else data)
        lines = data.split(b"\n")
        rest = lines.pop() + (b"\r" if held else b"")
        self._parts, self._n_rest = [rest], len(rest)
        for line in lines:
            if self._is_lines:
                yield from self._line(line)
            elif line:
                self._field(line)
            else:
                yield from self._event()
        if len(rest) > MOST_LINE_BYTES:
            raise UnreadableError(f"sent a line of more than {MOST_LINE_BYTES >> 20} MiB")

    def end(self) -> Iterator[Chunk]:
        """The reply is over: what the last bytes say, if they are complete."""
        data = b"".join(self._parts)
        self._parts, self._n_rest = [], 0
        if self._is_stream is False:
            if data.strip():
                yield from chunks(read_json(data))
        elif self._is_lines:
            yield from self._line(data)
        elif data == b"\r":
            yield from self._event()

    def _line(self, line: bytes) -> Iterator[Chunk]:
        """A line that is an event by itself."""
        if line.strip():
            self.n_events += 1
            yield from chunks(read_json(line))

    def _field(self, line: bytes) -> None:
        """A line of an event. Only its data matter (HTML standard, 9.2.6)."""
        self._n_event += len(line)
        if self._n_event > MOST_LINE_BYTES:
            raise UnreadableError(f"sent an event of more than {MOST_LINE_BYTES >> 20} MiB")
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> Iterator[Chunk]:
        """A blank line: the event is complete."""
        data, self._data, self._n_event = self._data, [], 0
        if data:
            self.n_events += 1
            text = b"\n".join(data)
            if text.strip() not in (b"", b"[DONE]", b"null"):
                yield from chunks(read_json(text))
