"""Sums of products of integers in eight lanes, of weight rows with few rows of x.

Integers of more than 7 bits and a sign are multiplied as words of 16 bits, others as bytes: AVX2
multiplies bytes without a sign with others and adds two products in 16 bits, which holds them as
long as one factor does not exceed 128. VNNI adds four products of bytes in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.linear.integer_blocks.integers_with_llvm import (
    FORMS,
    I16X16,
    PER_STRETCH,
    Form,
    LongBlocks,
)
from kernels.linear.integer_blocks.row_vectors_with_llvm import BYTE_ZERO, RowVectors, in_words
from kernels.linear.integer_blocks.rows_of_integers import MOST
from kernels.linear.integer_blocks.sums_with_llvm import add_byte_sums, byte_pair_sums, pair_sums
from kernels.llvm import Code, Value, vector
from kernels.llvm.values import I16, I32

_WORD = 2**15 - 1


def lane_scales(type: str, vnni: int, weights: LongBlocks) -> list[Value]:
    """The scale of each lane, for every eight lanes of the type: i32 [8 n], or in i16 [16 n] twice
    where those multiply pairs of words."""
    lanes, n = FORMS[type].lanes, weights.scales.type.count
    groups = weights.group_scales.type.count // n
    found = []
    for first in range(0, len(lanes), PER_STRETCH):
        of_lane = [lane * groups // len(lanes) for lane in lanes[first : first + PER_STRETCH]]
        scales = weights.group_scales.take([groups * i + g for i in range(n) for g in of_lane])
        pairs = not vnni and not in_words(type, vnni=vnni)
        found.append(scales.repeated(2).extended(I16) if pairs else scales.extended(I32))
    return found


def dot_products(
    code: Code,
    type: str,
    vnni: int,
    parts: Sequence[Value],
    rows: RowVectors,
    scales: Sequence[Value],
) -> list[Value]:
    """i32 [8 n] for each row of x: in every lane the sum of all its parts, times its
    scale.

    scales: those of lane_scales; none: the sums of products, offsets taken away.
    """
    n_parts = len(parts) // max(1, len(scales))
    totals: list[Value] = []
    for i, scale in enumerate(scales or [None]):
        some, at = parts[n_parts * i : n_parts * (i + 1)], n_parts * i
        if in_words(type, vnni=vnni):
            dots = _dots_of_words(code, some, rows, at)
        elif vnni:
            dots = _dots_with_vnni(code, type, some, rows, at)
        else:
            dots = _dots_of_bytes(code, FORMS[type], some, rows, at, scale)
            scale = None
        if scale is not None:
            dots = [dot * scale for dot in dots]
        totals = [a + b for a, b in zip(totals, dots, strict=True)] if totals else dots
    return totals


def _dots_of_words(code: Code, parts: Sequence[Value], rows: RowVectors, at: int) -> list[Value]:
    """Of parts from `at` on, bytes with a sign."""
    totals = rows.first_sums()
    for k, part in enumerate(parts, at):
        fours = part.bits(vector(I16, part.type.count // 2))
        for i, words in enumerate(((fours << 8).down_signed(8), fours.down_signed(8))):
            line = rows.integers(2 * k + i)
            totals = [t + pair_sums(code, words, x) for t, x in zip(totals, line, strict=True)]
    return totals


def _dots_of_bytes(
    code: Code, form: Form, parts: Sequence[Value], rows: RowVectors, at: int, factor: Value | None
) -> list[Value]:
    """As _dots_of_words, of bytes without a sign, times a factor; sums in 16 bits as long as they
    fit."""
    assert form.most is not None
    at_once = _WORD // (2 * form.most * MOST)
    factor = factor or code.constant(I16X16, 1)
    totals = rows.first_sums()
    for k in range(0, len(parts), at_once):
        words = [code.constant(I16X16, 0)] * rows.count
        for i in range(k, min(k + at_once, len(parts))):
            line = rows.integers(at + i)
            words = [
                w + byte_pair_sums(code, parts[i], x) for w, x in zip(words, line, strict=True)
            ]
        totals = [t + pair_sums(code, w, factor) for t, w in zip(totals, words, strict=True)]
    return totals


def _dots_with_vnni(
    code: Code, type: str, parts: Sequence[Value], rows: RowVectors, at: int
) -> list[Value]:
    """As _dots_of_words, of all bytes."""
    if FORMS[type].most is None:
        parts = [part ^ -BYTE_ZERO for part in parts]
    totals = rows.first_sums()
    for i, part in enumerate(parts, at):
        line = rows.integers(i)
        totals = [add_byte_sums(code, t, part, x) for t, x in zip(totals, line, strict=True)]
    return totals
