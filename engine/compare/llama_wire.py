"""Frames between Draftscope and a process that drives llama.cpp (llama_driver.cpp).

A frame is its length (u64) and values; a value is `i` and an int64, or `b`, a length (u64) and
bytes, all little endian. A request begins with the name of a command, a reply with 0, or with 1,
the kind of error and a message.

With a folder in an environment variable, every process that is driven from here writes a transcript
of what it was asked, to ask another build the same: a frame for each command. The number of a blob
that the library gave is in its place: another build loads its own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from engine.errors import PeerLibraryError

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


TRANSCRIPTS = "DRAFTSCOPE_LLAMA_TRANSCRIPTS"
_numbers = itertools.count()


class Asked(NamedTuple):
    """A command. saved: places in values that hold the number of a blob, from 0, as they came."""

    name: str
    values: list[Value]
    saved: tuple[int, ...]


class Transcript:
    """Writes the commands of one process into a folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{next(_numbers):04}"
        self._file = path.open("wb")
        self._blobs: dict[bytes, int] = {}
        self._n_saved = 0

    def add(self, name: str, values: Sequence[Value | str], reply: Sequence[Value]) -> None:
        """A command that was answered."""
        kept, places = list(values), 0
        for place, value in enumerate(values):
            number = self._blobs.get(_hash(value)) if isinstance(value, bytes) else None
            if number is not None:
                kept[place], places = number, places | 1 << place
        if name == "save" and isinstance(reply[0], bytes):
            self._blobs[_hash(reply[0])] = self._n_saved
            self._n_saved += 1
        write_frame(self._file, [name, places, *kept])

    def close(self) -> None:
        """No further command comes."""
        self._file.close()


def transcript() -> Transcript | None:
    """A new transcript, if the environment asks for one."""
    folder = os.environ.get(TRANSCRIPTS)
    return Transcript(Path(folder)) if folder else None


def read_transcript(path: Path) -> list[Asked]:
    """The commands of a transcript; of one that was cut short, those that are whole. Raises
    PeerLibraryError."""
    found: list[Asked] = []
    with path.open("rb") as file:
        while True:
            try:
                name, places, *values = read_frame(file)
            except EOFError:
                return found
            except (WireError, ValueError) as error:
                raise PeerLibraryError(
                    f"{path.name} is not a transcript: {error}.", "Record it anew."
                ) from error
            if not isinstance(name, bytes) or not isinstance(places, int):
                raise PeerLibraryError(f"{path.name} is not a transcript.", "Record it anew.")
            saved = tuple(i for i in range(len(values)) if places >> i & 1)
            found.append(Asked(name.decode("utf-8", "replace"), values, saved))


def _hash(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()
