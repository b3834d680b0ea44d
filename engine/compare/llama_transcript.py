"""Transcripts of what a llama.cpp process was asked, to ask another build the same.

With a folder in the environment variable, every process that is driven from here writes one: a
frame of llama_wire for each command. The number of a blob that the library gave is in its place:
another build loads its own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.compare.llama_wire import Value, WireError, read_frame, write_frame
from engine.errors import PeerLibraryError

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
