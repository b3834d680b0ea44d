"""Bounded little-endian reads from a mapped file whose contents nobody vouches for."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from engine.errors import ModelFileError

# Metadata and tensor directory together. A 260k-token vocabulary with merges takes 15 MB; the
# limit keeps memory flat when a damaged length happens to fit a very large file.
MAX_HEADER_BYTES = 64 * 2**20
DAMAGED = "The file is incomplete or damaged: download or copy it again."

_LENGTH = struct.Struct("<Q")


def shorten(name: str, limit: int = 80) -> str:
    """A name from the file as one printable line of at most `limit` characters."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:limit])
    return line if len(name) <= limit else line[:-1] + "…"


class Cursor:
    """Reads onward from `pos`; each read is checked against the file before it happens.

    `place` says what is being read; errors name it, or the byte offset while it is empty.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.path = path
        self.pos = 0
        self.place = ""
        self.size = len(data)
        self._data = data
        self._limit = min(self.size, MAX_HEADER_BYTES)

    def error(self, what: str, remedy: str = DAMAGED) -> ModelFileError:
        return ModelFileError(self.path, self.place or f"byte {self.pos}", what, remedy)

    def need(self, n_bytes: int) -> None:
        """Raise ModelFileError unless `n_bytes` more bytes of header are there."""
        if self.pos + n_bytes <= self._limit:
            return
        left = self.size - self.pos
        if n_bytes > left:
            raise self.error(f"{n_bytes} bytes are needed at byte {self.pos}, but {left} are left")
        raise self.error(f"the metadata exceeds {MAX_HEADER_BYTES >> 20} MiB")

    def room_for(self, count: int, min_bytes: int, what: str) -> None:
        """Raise ModelFileError if `count` things of at least `min_bytes` cannot fit the file."""
        most = (self.size - self.pos) // min_bytes
        if count > most:
            raise self.error(f"{count} {what} are announced, but the file has room for {most}")

    def scalar(self, code: struct.Struct) -> int | float | bool:
        self.need(code.size)
        value: int | float | bool = code.unpack_from(self._data, self.pos)[0]
        self.pos += code.size
        return value

    def u32(self) -> int:
        self.need(4)
        self.pos += 4
        return int.from_bytes(self._data[self.pos - 4 : self.pos], "little")

    def u64(self) -> int:
        self.need(8)
        self.pos += 8
        return int.from_bytes(self._data[self.pos - 8 : self.pos], "little")

    def text(self) -> str:
        """A length-prefixed string; invalid UTF-8 becomes U+FFFD."""
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """`count` length-prefixed strings, one after another."""
        self.room_for(count, _LENGTH.size, "strings")
        data, limit, length_at = self._data, self._limit, _LENGTH.unpack_from
        pos = self.pos
        found: list[str] = []
        for _ in range(count):
            start = pos + 8
            if start > limit:
                self.pos = pos
                self.need(8)
            pos = start + length_at(data, pos)[0]
            if pos > limit:
                self.pos = start
                self.need(pos - start)
            found.append(data[start:pos].decode("utf-8", "replace"))
        self.pos = pos
        return found

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        """`count` numbers as an array of its own [count]; dtype with byte order, as "<u4"."""
        item = np.dtype(dtype)
        self.room_for(count, item.itemsize, "numbers")
        self.need(count * item.itemsize)
        array = np.frombuffer(self._data, item, count, self.pos).copy()
        self.pos += count * item.itemsize
        return array
