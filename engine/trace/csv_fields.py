r"""CSV fields in place: the offsets of every field in the bytes of a file, block by block.

Python objects are created only for fields that a reader requests, so long traces open fast. The
dialect is RFC 4180: quotes enclose a whole field or none of it. Lines may end with "\r\n", "\n" or
"\r"; inside quotes these are read as "\n".

Columns of numbers are parsed all at once. Eight digits are one word, whose value takes three
multiplications. A real is an integer divided by a power of ten, which rounds correctly as long as
both are exact. Everything else is parsed one by one, with the same result.

In the variant for spreadsheets no cell is a formula. A spreadsheet decides by the first character
of a cell, and where a cell begins depends on the locale: in many, fields end at semicolons, quotes
inside such a field mean nothing, and a line feed inside them ends the row. So an apostrophe is put
before a dangerous character, or another apostrophe, at the start of a cell and after everything
that may end a field; removing one restores every text. The files begin with a byte order mark,
without which Excel does not read them as UTF-8. Numbers stay numbers: a minus sign followed by
digits only is harmless.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from engine.errors import TraceFileError

PLAIN, EXCEL = "plain", "excel"
"""Values of csv_variant in session.json."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Full-width forms count where the spreadsheet runs in an East Asian locale (OWASP)."""

FIELD_ENDS = (";", "\t", "|", "\r", "\n", "\u061b")
"""Field ends other than the comma, which quotes protect: list separators of locales and imports
(the last is the Arabic semicolon), and line ends."""

_GUARD = "'"
_STARTS, _ENDS = re.escape("".join(FORMULA_STARTS)), re.escape("".join(FIELD_ENDS))
# a quote that opens a field may be followed by one that closes it and by the start of the next
_DANGEROUS = re.compile(f'^(?=[{_STARTS}{_GUARD}])|(?<=[{_ENDS}])(?=[{_STARTS}{_GUARD}"])')
_GUARDED = re.compile(f"(?:^|(?<=[{_ENDS}])){_GUARD}")
_NUMBER = re.compile(r"[+-]?[0-9][0-9.]*(e[+-]?[0-9]+)?", re.IGNORECASE)


def encoding(variant: str) -> str:
    """Python's encoding name for a variant's files."""
    return "utf-8-sig" if variant == EXCEL else "utf-8"


def guard(cells: Sequence[Any]) -> list[Any]:
    """Cells with an apostrophe wherever a spreadsheet could see a formula; numbers are
    unchanged."""
    return [
        _DANGEROUS.sub(_GUARD, cell)
        if isinstance(cell, str) and not _NUMBER.fullmatch(cell)
        else cell
        for cell in cells
    ]


def unguard(cells: Sequence[str]) -> list[str]:
    """Remove the apostrophes of `guard`."""
    return [_GUARDED.sub("", cell) for cell in cells]


_NAMED = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def escape_piece(piece: bytes) -> str:
    """Printable characters as they are, everything else escaped; never a raw newline.

    `\\n`, `\\t`, `\\r` and `\\\\` have names. Bytes that are no UTF-8, and the UTF-8 bytes of
    characters that show nothing (controls, joiners, unusual spaces), become `\\xE4`. No two
    byte strings give the same text.
    """
    text = piece.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    named = _NAMED.get(char)
    if named is not None:
        return named
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))


REMEDY = "Export the trace again."
PAD = b"0" * 16
"""Prepended to the bytes of a block, so that whole words that end with a field can be read."""
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
        """line: number of the first line. seps: offsets of commas and line ends that end a field,
        int64."""
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
        """The fields of a column as bytes, for all rows or the given ones."""
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
        """Whether each field of a column has at most 16 bytes, bool [rows]."""
        return self.ends[column] - self.starts[column] <= 2 * _WORD.itemsize

    def short_texts(self, column: int) -> np.ndarray:
        """Numbers [3, rows] that are equal exactly where short fields are equal: the length, and
        the last 16 bytes as two words."""
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
        """An error naming file and line."""
        return TraceFileError(f"{self.name} line {self.line(row)}: {what}.", REMEDY)

    def _rows(self, seps: np.ndarray, n_columns: int) -> np.ndarray:
        """Separators by row, [rows, columns]. Raises where a row has too many or too few fields."""
        n_rows, rest = divmod(len(seps), n_columns)
        newlines = np.flatnonzero(self.bytes[seps] == _NEWLINE)
        if not rest and np.array_equal(newlines, np.arange(1, n_rows + 1) * n_columns - 1):
            return seps.reshape(n_rows, n_columns)
        self._row_ends = seps[newlines]
        counts = np.diff(newlines, prepend=-1)
        row = int((counts != n_columns).argmax())
        raise self.error(row, f"{counts[row]} fields instead of {n_columns}")

    def _unquote(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Strip quotes from fields, in place. Raises where quotes do not enclose a field."""
        quotes = np.flatnonzero(self.bytes == _QUOTE)
        opening, closing = quotes[0::2], quotes[1::2]
        fields = np.searchsorted(starts, opening, side="right") - 1
        begins = starts[fields] == opening
        again = np.append(closing[:-1] + 1 == opening[1:], False)  # "" in a field
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
    """The names in the first line; the file is then positioned after it. Raises TraceFileError."""
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


_ZEROS = np.uint64(0x3030303030303030)
_NOT_DIGITS = np.uint64(0x8080808080808080)
_ABOVE_NINE = np.uint64(0x7676767676767676)
_PAIRS = np.uint64(0x000000FF000000FF)
_OUTER = np.uint64(100 + (1_000_000 << 32))
_INNER = np.uint64(1 + (10_000 << 32))
_EIGHT, _SIXTEEN, _HALF = np.uint64(8), np.uint64(16), np.uint64(32)
_TEN = np.uint64(10)
_HUNDRED_MILLION = np.uint64(10**8)
_MOST_DIGITS = 15
_POWERS = 10.0 ** np.arange(23)
"""Powers of ten that float64 represents exactly."""
_INTEGER_POWERS = 10 ** np.arange(17, dtype=np.int64)


class NotANumberError(Exception):
    """A field that is not a number; args: its row in the block."""


def whole_numbers(block: FieldBlock, column: int, missing: int) -> np.ndarray:
    """int64 [rows]; an empty field is `missing`. Raises NotANumberError, also beyond int64."""
    starts, ends = block.starts[column], block.ends[column]
    empty = starts == ends
    if empty.all():
        return np.full(block.n_rows, missing)
    values, known = _digits(block.words, starts, ends)
    values[empty] = missing
    for row in np.flatnonzero(~known).tolist():
        (cell,) = block.cells(column, [row])
        try:
            values[row] = int(_plain(cell))
        except (ValueError, OverflowError):
            raise NotANumberError(row) from None
    return values


def real_numbers(block: FieldBlock, column: int) -> np.ndarray:
    """float64 [rows], correctly rounded; an empty field is NaN. Raises NotANumberError."""
    starts, ends = block.starts[column], block.ends[column]
    empty = starts == ends
    if empty.all():
        return np.full(block.n_rows, np.nan)
    text, words = block.bytes, block.words
    is_scaled = (text[ends - 4] == ord("e")) & (ends - starts > 4)
    exponents = np.zeros(block.n_rows, np.int64)
    known = np.ones(block.n_rows, bool)
    if is_scaled.any():
        at = ends[is_scaled]
        size, known[is_scaled] = _digits(words, at - 2, at)
        sign = text[at - 3]
        exponents[is_scaled] = np.where(sign == ord("-"), -size, size)
        known[is_scaled] &= (sign == ord("-")) | (sign == ord("+"))
    ends = np.where(is_scaled, ends - 4, ends)

    dot = block.dots[np.searchsorted(block.dots, starts)]
    has_dot = dot < ends
    whole_ends = np.where(has_dot, dot, ends)
    part_starts = np.where(has_dot, dot + 1, ends)
    whole, is_whole = _digits(words, starts, whole_ends)
    part, is_part = _digits(words, part_starts, ends)
    n_whole, n_part = whole_ends - starts, ends - part_starts
    scale = exponents - n_part
    known &= is_whole & is_part & (n_whole > 0) & (n_whole + n_part <= _MOST_DIGITS)
    known &= (abs(scale) < len(_POWERS)) & ((n_part > 0) | ~has_dot)
    digits = (whole * _INTEGER_POWERS[np.minimum(n_part, 16)] + part).astype(np.float64)
    power = _POWERS[np.minimum(abs(scale), len(_POWERS) - 1)]
    values = np.where(scale < 0, digits / power, digits * power)
    values[empty] = np.nan
    for row in np.flatnonzero(~(known | empty)).tolist():
        (cell,) = block.cells(column, [row])
        try:
            values[row] = float(_plain(cell))
        except ValueError:
            raise NotANumberError(row) from None
    return values


def _plain(cell: bytes) -> bytes:
    if b"_" in cell:
        raise ValueError("underscores are not allowed in numbers")
    return cell


def _digits(
    words: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values of fields of up to 16 digits, int64, and which fields are such; an empty one gives
    0."""
    lengths = ends - starts
    low, known = _eight(words, ends, np.minimum(lengths, 8))
    long = np.flatnonzero(lengths > 8)
    if len(long):
        high, also = _eight(words, ends[long] - 8, np.minimum(lengths[long] - 8, 8))
        low[long] += high * _HUNDRED_MILLION
        known[long] &= also & (lengths[long] <= 16)
    return low.view(np.int64), known


def _eight(
    words: np.ndarray, ends: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values of fields of up to 8 digits, uint64, and which are digits only; empty ones give 0."""
    word = words[ends - 8] ^ _ZEROS
    unused = ((8 - lengths) * 8).astype(np.uint64)
    word = np.where(lengths > 0, word >> unused << unused, np.uint64(0))
    known = ((word + _ABOVE_NINE) | word) & _NOT_DIGITS == 0
    word = word * _TEN + (word >> _EIGHT)
    word = (word & _PAIRS) * _OUTER + ((word >> _SIXTEEN) & _PAIRS) * _INNER
    return word >> _HALF, known
