"""Frames between Draftscope and a process that drives llama.cpp (llama_driver.cpp).

A frame is its length (u64) and values; a value is `i` and an int64, or `b`, a length (u64) and
bytes, all little endian. A request begins with the name of a command, a reply with 0, or with 1,
the kind of error and a message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import IO

Value = int | bytes
_N = struct.Struct("<Q")
_INTEGER = struct.Struct("<q")
_MOST_BYTES = 1 << 34
_PIECE = 1 << 20


class WireError(Exception):
    """What arrived is not a frame."""


def write_frame(stream: IO[bytes], values: Sequence[Value | str]) -> None:
    """Send values as one frame."""
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, int):
            parts.append(b"i" + _INTEGER.pack(value))
            continue
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        parts += [b"b" + _N.pack(len(raw)), raw]
    stream.write(_N.pack(sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[Value]:
    """The values of the next frame. Raises EOFError at the end of the stream or in the middle of a
    frame, and WireError for what is not one."""
    (n,) = _N.unpack(_read(stream, _N.size))
    if n > _MOST_BYTES:
        raise WireError(f"a frame of {n} bytes")
    frame = memoryview(_read(stream, n))
    values: list[Value] = []
    at = 0
    while at < n:
        kind, body = bytes(frame[at : at + 1]), at + 1 + _N.size
        if kind not in (b"i", b"b") or body > n:
            raise WireError(f"a value of kind {kind!r}")
        if kind == b"i":
            values.append(_INTEGER.unpack(frame[at + 1 : body])[0])
            at = body
            continue
        (size,) = _N.unpack(frame[at + 1 : body])
        if size > n - body:
            raise WireError(f"{size} bytes in a frame of {n}")
        values.append(bytes(frame[body : body + size]))
        at = body + size
    return values


def _read(stream: IO[bytes], n: int) -> bytes:
    """n bytes, as they arrive: a false length takes no memory."""
    parts: list[bytes] = []
    while n:
        part = stream.read(min(n, _PIECE))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
