"""A CSV file as fields in place: where each begins and ends among the bytes, block by block.

Python objects are made for no field, only for what a reader asks for: that is what makes long
traces open fast. The dialect is RFC 4180: quotes enclose a whole field or none of it. Lines may
end with "\\n", "\\r\\n" or "\\r"; inside of quotes too they count as "\\n".
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import BinaryIO

import numpy as np

from engine.errors import TraceFileError
from engine.trace.cell_text import EXCEL, encoding, unguard

REMEDY = "Export the trace again."
PAD = b"0" * 16
"""In front of the bytes of a block, so that whole words may be read that end with a field."""
_CHUNK = 1 << 19
_LONGEST_FIELD = 1 << 17
_LONGEST_ROW = 1 << 23
_COMMA, _NEWLINE, _QUOTE, _DOT = b',\n".'
_WORD = np.dtype("<u8")


class FieldBlock:
    """Some rows of a file.

    data: their bytes after PAD. starts, ends: of each field without its quotes, int64
    [columns, rows].
    """

    def __init__(self, name: str, data: bytes, line: int, n_columns: int, seps: np.ndarray) -> None:
        """line: number of the first. seps: commas and line ends that end a field, int64."""
        self.name, self.data, self._line = name, data, line
        self.bytes = np.frombuffer(data, np.uint8)
        self._doubled: set[int] = set()
        rows = self._rows(seps, n_columns)
        self._row_ends = rows[:, -1]
        ends = seps
        starts = np.empty_like(ends)
        starts[0], starts[1:] = len(PAD), ends[:-1] + 1
        if b'"' in data:
            ends = ends.copy()
            self._unquote(starts, ends)
        if int((ends - starts).max(initial=0)) > _LONGEST_FIELD:
            at = int((ends - starts).argmax())
            raise self.error(at // n_columns, f"a field has more than {_LONGEST_FIELD:,} bytes")
        self.starts = np.ascontiguousarray(starts.reshape(-1, n_columns).T)
        self.ends = np.ascontiguousarray(ends.reshape(-1, n_columns).T)
        self.n_rows = len(rows)

    @cached_property
    def dots(self) -> np.ndarray:
        """Offsets of the decimal points, int64; the last entry is the length of the bytes."""
        return np.append(np.flatnonzero(self.bytes == _DOT), len(self.bytes))

    @cached_property
    def words(self) -> np.ndarray:
        """words[i]: the eight bytes from i on as a little-endian number, uint64."""
        return np.ndarray((len(self.data) - 7,), _WORD, buffer=self.data, strides=(1,))

    def cells(self, column: int, rows: Sequence[int] | np.ndarray | None = None) -> list[bytes]:
        """The fields of a column as bytes, in all rows or in the given ones."""
        starts, ends = self.starts[column], self.ends[column]
        if rows is not None:
            starts, ends = starts[rows], ends[rows]
        data = self.data
        found = [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        if self._doubled:
            for i, start in enumerate(starts.tolist()):
                if start in self._doubled:
                    found[i] = found[i].replace(b'""', b'"')
        return found

    def are_short(self, column: int) -> np.ndarray:
        """Which fields of a column have at most 16 bytes, bool [rows]."""
        return self.ends[column] - self.starts[column] <= 2 * _WORD.itemsize

    def short_texts(self, column: int) -> np.ndarray:
        """Numbers that are equal where short fields are and only there, [3, rows]: the length,
        and the last 16 bytes as two words."""
        starts, ends = self.starts[column], self.ends[column]
        lengths = ends - starts
        found = [lengths.astype(np.uint64)]
        for skipped in (0, _WORD.itemsize):
            unused = (_WORD.itemsize - np.clip(lengths - skipped, 1, _WORD.itemsize)) * 8
            word = self.words[np.maximum(ends - skipped - _WORD.itemsize, 0)]
            word = word >> unused.astype(np.uint64)
            found.append(np.where(lengths > skipped, word, np.uint64(0)))
        return np.stack(found)

    def line(self, row: int) -> int:
        """The line on which a row ends."""
        return self._line + self.data.count(b"\n", len(PAD), int(self._row_ends[row]))

    def error(self, row: int, what: str) -> TraceFileError:
        """An error that names file and line."""
        return TraceFileError(f"{self.name} line {self.line(row)}: {what}.", REMEDY)

    def _rows(self, seps: np.ndarray, n_columns: int) -> np.ndarray:
        """The separators by row, [rows, columns]. Raises where a row is longer or shorter."""
        n_rows, rest = divmod(len(seps), n_columns)
        newlines = np.flatnonzero(self.bytes[seps] == _NEWLINE)
        if not rest and np.array_equal(newlines, np.arange(1, n_rows + 1) * n_columns - 1):
            return seps.reshape(n_rows, n_columns)
        self._row_ends = seps[newlines]
        counts = np.diff(newlines, prepend=-1)
        row = int((counts != n_columns).argmax())
        raise self.error(row, f"{counts[row]} fields instead of {n_columns}")

    def _unquote(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Take the quotes off fields, in place. Raises where quotes are not around a field."""
        quotes = np.flatnonzero(self.bytes == _QUOTE)
        opening, closing = quotes[0::2], quotes[1::2]
        fields = np.searchsorted(starts, opening, side="right") - 1
        begins = starts[fields] == opening
        again = np.append(closing[:-1] + 1 == opening[1:], False)  # a quote in a field is doubled
        is_good = begins | np.insert(again[:-1], 0, False)
        is_good &= (closing + 1 == ends[fields]) | again
        if not is_good.all():
            at = int((~is_good).argmax())
            row = int(np.searchsorted(self._row_ends, opening[at]))
            raise self.error(row, "not valid CSV (a quote inside of a field)")
        quoted = fields[begins]
        starts[quoted] += 1
        ends[quoted] -= 1
        self._doubled = set(starts[fields[~begins]].tolist())


def read_header(file: BinaryIO, name: str, variant: str) -> list[str]:
    """The names in the first line; the file is then after it. Raises TraceFileError."""
    line = file.readline(_LONGEST_FIELD).decode(encoding(variant))
    try:
        names = next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise TraceFileError(f"{name} line 1: not valid CSV ({error}).", REMEDY) from error
    if variant == EXCEL:
        names = unguard(names)
    if not names or len(set(names)) != len(names):
        raise TraceFileError(f"{name} line 1: no header row with a name per column.", REMEDY)
    return names


def read_blocks(
    file: BinaryIO, name: str, n_columns: int, size: int | None = None
) -> Iterator[FieldBlock]:
    """The rows after the header, of the first `size` bytes of the file. Raises TraceFileError and
    UnicodeDecodeError."""
    rest, line, more = b"", 2, b"\n"
    left = sys.maxsize if size is None else max(0, size - file.tell())
    while more:
        more = file.read(min(_CHUNK, left))
        if more.endswith(b"\r"):
            more += file.read(min(1, left - len(more)))
        left -= len(more)
        data = rest + more
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not more and data and not data.endswith(b"\n"):
            data += b"\n"
        seps, stop = _separators(PAD + data)
        rest, data = data[stop:], PAD + data[:stop]
        if rest and (not more or len(rest) > _LONGEST_ROW):
            raise TraceFileError(
                f"{name} line {line + data.count(10)}: not valid CSV (a quote is never closed).",
                REMEDY,
            )
        if stop:
            if not data.isascii():
                data.decode()
            yield FieldBlock(name, data, line, n_columns, seps)
            line += data.count(b"\n")


def _separators(data: bytes) -> tuple[np.ndarray, int]:
    """Offsets of the ends of all fields in whole rows, int64, and how many bytes those take."""
    found = np.frombuffer(data, np.uint8)
    seps = np.flatnonzero((found == _COMMA) | (found == _NEWLINE))
    if b'"' in data:
        quotes = np.flatnonzero(found == _QUOTE)
        opening, closing = quotes[0::2], quotes[1::2]
        change = np.zeros(len(seps) + 1, np.int8)
        np.add.at(change, np.searchsorted(seps, opening), 1)
        np.add.at(change, np.searchsorted(seps, closing), -1)
        seps = seps[np.cumsum(change[:-1], dtype=np.int8) == 0]
    newlines = np.flatnonzero(found[seps] == _NEWLINE)
    if not len(newlines):
        return seps[:0], 0
    seps = seps[: newlines[-1] + 1]
    return seps, int(seps[-1]) + 1 - len(PAD)
