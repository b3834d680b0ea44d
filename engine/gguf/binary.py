"""Bounded little-endian reads from a file that is not trusted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import overload

import numpy as np

from engine.errors import Cancelled, ModelFileError
from engine.gguf.part_file import DAMAGED, PartFile

UNUSUAL = "No known model needs that many: convert or download the model again."
TOO_LONG = "No known model needs one of more than 32 MiB: convert or download the model again."
BLOCK = 8192
"""Strings processed between two checks for cancellation: a few milliseconds."""

_LENGTH = struct.Struct("<Q")
_FIRST_READ = 1 << 16
"""Initial read of a head of unknown size; each further read doubles it."""
_LONGEST_TEXT = 32 * 2**20
"""Bytes of one string: a tokenizer's JSON may be long, and invalid text takes several times its
bytes while it is decoded."""


def never() -> bool:
    """A `cancelled` callback that never cancels."""
    return False


def check_cancelled(cancelled: Callable[[], bool]) -> None:
    """Raise Cancelled once `cancelled` returns True."""
    if cancelled():
        raise Cancelled


class HeadAllowance:
    """Limits on the contents of a model's heads, all parts together.

    A vocabulary of 250,000 tokens with merges has 750,000 strings in 15 MB; the largest models have
    a few hundred keys and, with separate experts, 50,000 tensors. Everything within the limits is
    read in about a second, whatever the file.
    """

    def __init__(self) -> None:
        self.n_bytes = 64 * 2**20
        self._left = {
            "metadata keys": 1 << 14,
            "tensors": 1 << 16,
            "strings": 1 << 21,
            "numbers": 1 << 22,
        }

    def take(self, count: int, what: str) -> int | None:
        """Count items; returns the remaining allowance if it is too small, else None."""
        left = self._left[what]
        if count > left:
            return left
        self._left[what] = left - count
        return None


def shorten(name: str, limit: int = 80) -> str:
    """A name from the file as one printable line of at most `limit` characters."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:limit])
    return line if len(name) <= limit else line[:-1] + "…"


class StringArray(Sequence[str]):
    """Strings of a file, decoded on access, invalid UTF-8 as U+FFFD: as objects a vocabulary would
    take ten times its bytes."""

    def __init__(self, data: bytes, ends: Sequence[int] | np.ndarray) -> None:
        """data: length-prefixed strings, as in the file. ends: end offsets."""
        self._data, self._ends = data, np.array(ends, np.int32)
        self._starts = np.full_like(self._ends, _LENGTH.size)
        self._starts[1:] += self._ends[:-1]

    @classmethod
    def of(cls, texts: Collection[str]) -> StringArray:
        """From texts, encoded as in a file."""
        if isinstance(texts, cls):
            return texts
        parts = [text.encode("utf-8", "replace") for text in texts]
        data = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        return cls(data, list(accumulate(_LENGTH.size + len(part) for part in parts)))

    @property
    def longest(self) -> int:
        """Bytes of the longest one."""
        return int((self._ends - self._starts).max(initial=0))

    @cached_property
    def keys(self) -> np.ndarray:
        """See `keys`, of all."""
        return keys(self.parts(self._starts, self._ends))

    def places(self, texts: Collection[str]) -> list[int]:
        """Indices of all strings that equal one of these."""
        found = np.flatnonzero(among(self.keys, StringArray.of(texts).keys))
        return [i for i in found.tolist() if self[i] in texts]

    def first(self, character: bytes) -> np.ndarray:
        """Offset in the data of this ASCII character in each string, int32 [n]; -1 if absent."""
        places = np.flatnonzero(np.frombuffer(self._data, np.uint8) == ord(character))
        places = np.append(places, len(self._data)).astype(np.int32)
        first = places[np.searchsorted(places, self._starts)]
        return np.where(first < self._ends, first, -1)

    def parts(self, starts: np.ndarray | None, ends: np.ndarray | None) -> ByteParts:
        """The bytes of each string between two offsets, or all before or after."""
        starts = self._starts if starts is None else starts
        ends = self._ends if ends is None else ends
        # eight bytes at every offset, also at the end
        words = _words(self._data + bytes(8))
        n = ends - starts
        unused = (8 * (8 - np.minimum(n, 8))).astype(np.uint64)
        return n, words[starts] << unused >> unused, words[ends - 8] >> unused

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        data, starts, ends = self._data, self._starts[index], self._ends[index]
        if not isinstance(index, slice):
            return data[starts:ends].decode("utf-8", "replace")
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return [data[start:stop].decode("utf-8", "replace") for start, stop in places]

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, StringArray)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


ByteParts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""For each string its length in bytes, int32 [n], and its first and last eight bytes, uint64
[n]."""


def _words(data: bytes | bytearray) -> np.ndarray:
    """The eight bytes from each offset on as a number, uint64 [n - 7], in the same memory."""
    return np.ndarray(max(len(data) - 7, 0), "<u8", data, strides=(1,))


def joined(left: ByteParts, right: ByteParts) -> ByteParts:
    """Each left string concatenated with its right one."""
    (n_left, first_left, last_left), (n_right, first_right, last_right) = left, right
    known = np.minimum(n_left, 8)
    kept = np.minimum(n_left, 8 - np.minimum(n_right, 8))
    bits, gone, below = (8 * n.astype(np.uint64) for n in (known, known - kept, kept))
    first = first_left | first_right << bits
    return n_left + n_right, first, last_left >> gone | last_right << below


def keys(parts: ByteParts) -> np.ndarray:
    """A hash for each, uint64 [n]; different strings may have equal ones."""
    n, first, last = (part.astype(np.uint64) for part in parts)
    mixed: np.ndarray = n * np.uint64(0x9E3779B97F4A7C15) + first * np.uint64(0xC2B2AE3D27D4EB4F)
    return mixed + last * np.uint64(0x165667B19E3779F9)


def among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each key is among the known ones, bool [n]; sorted keys take a fifth of the time."""
    if not len(known):
        return np.zeros(len(keys), bool)
    known = np.sort(known)
    return known[np.searchsorted(known[:-1], keys)] == keys


class Cursor:
    """Reads a file's head from `pos` on; each read is checked against the file's size first.

    `place` names what is being read, for errors; if it is empty, they give the byte offset.
    """

    def __init__(
        self, part: PartFile, allowance: HeadAllowance, cancelled: Callable[[], bool] = never
    ) -> None:
        self.path = part.path
        self.pos = 0
        self.place = ""
        self.size = part.n_bytes
        self._part = part
        self._data = bytearray()
        self._allowance = allowance
        self._limit = min(self.size, allowance.n_bytes)
        self._cancelled = cancelled
        self._fill(_FIRST_READ)

    @property
    def begin(self) -> bytes:
        """The first bytes, which identify the file type."""
        return bytes(self._data[:64])

    @property
    def head(self) -> bytes:
        """What has been read so far."""
        return bytes(memoryview(self._data)[: self.pos])

    def error(self, what: str, remedy: str = DAMAGED) -> ModelFileError:
        return ModelFileError(self.path, self.place or f"byte {self.pos}", what, remedy)

    def need(self, n_bytes: int) -> None:
        """Read at least `n_bytes` more header bytes. Raises ModelFileError if the file is too
        short."""
        wanted = self.pos + n_bytes
        if wanted <= len(self._data):
            return
        if wanted <= self._limit:
            self._fill(max(wanted, 2 * len(self._data)))
            return
        left = self.size - self.pos
        if n_bytes > left:
            raise self.error(f"{n_bytes} bytes are needed at byte {self.pos}, but {left} are left")
        raise self.error("the metadata exceeds 64 MiB", UNUSUAL)

    def _fill(self, n_bytes: int) -> None:
        """Read on until the first n_bytes are available, or the limit is reached."""
        start = len(self._data)
        more = bytearray(min(n_bytes, self._limit) - start)
        self._part.read(start, memoryview(more))
        self._data += more

    def room_for(self, count: int, min_bytes: int, what: str) -> None:
        """Raise ModelFileError if `count` things of at least `min_bytes` cannot fit the file."""
        most = (self.size - self.pos) // min_bytes
        if count > most:
            raise self.error(f"it has {count} {what}, but the file has room for {most}")

    def announced(self, count: int, min_bytes: int, what: str) -> None:
        """Like room_for, and subtract `count` from the allowance."""
        self.room_for(count, min_bytes, what)
        left = self._allowance.take(count, what)
        if left is not None:
            raise self.error(f"it has {count} {what}, but at most {left} are read", UNUSUAL)

    def check_cancelled(self) -> None:
        check_cancelled(self._cancelled)

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
        start = self.pos + _LENGTH.size
        self._pass()
        return self._data[start : self.pos].decode("utf-8", "replace")

    def texts(self, count: int) -> StringArray:
        """`count` length-prefixed strings, one after another."""
        self.announced(count, _LENGTH.size, "strings")
        begin, ends = self.pos, np.zeros(count, np.int32)
        for start in range(0, count, BLOCK):
            self.check_cancelled()
            block = ends[start : start + BLOCK]
            places = self._short(len(block))
            if places is None:
                for i in range(len(block)):
                    self._pass()
                    block[i] = self.pos - begin
            else:
                block[:] = places - begin
        return StringArray(bytes(memoryview(self._data)[begin : self.pos]), ends)

    def _pass(self) -> None:
        """Skip one string."""
        n = self.u64()
        self.need(n)
        if n > _LONGEST_TEXT:
            raise self.error(f"a string of {n} bytes", TOO_LONG)
        self.pos += n

    def _short(self, count: int) -> np.ndarray | None:
        """Skip strings that are all shorter than 256 bytes, in a tenth of the time; returns their
        end offsets, int64 [count]. None, skipping nothing, if one is longer or the file ends."""
        room = min(self.pos + (count << 8), self._limit)
        if room > len(self._data):
            self._fill(max(room, 2 * len(self._data)))
        data, pos = self._data, self.pos
        try:
            ends = np.array([pos := pos + data[pos] + _LENGTH.size for _ in range(count)])
        except IndexError:
            return None
        starts = np.append(self.pos, ends[:-1])
        if pos > len(data) or (_words(data)[starts] > 255).any():
            return None
        self.pos = pos
        return ends

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        """`count` numbers as an array of its own [count]; dtype with byte order, as "<u4"."""
        item = np.dtype(dtype)
        self.announced(count, item.itemsize, "numbers")
        self.need(count * item.itemsize)
        array = np.frombuffer(self._data, item, count, self.pos).copy()
        self.pos += count * item.itemsize
        return array
