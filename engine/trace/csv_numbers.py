"""Columns of numbers out of the fields of a block, all at once.

Eight digits are one word, whose value takes three multiplications. A real is a whole number over
a power of ten, which rounds correctly as long as both are exact. What does not fit this is read
one by one, and gives the same as if all had been.
"""

from __future__ import annotations

import numpy as np

from engine.trace.csv_fields import FieldBlock

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
"""Powers of ten that float64 holds exactly."""
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
    """float64 [rows], each as near as can be; an empty field is NaN. Raises NotANumberError."""
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
        raise ValueError("Python's underscores are no part of a number here")
    return cell


def _digits(
    words: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Values of fields of up to 16 digits, int64, and which of them are that; none give 0."""
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
