"""Sums of products of integers in eight lanes, of weight rows with few rows of x.

Integers of more than 7 bits and a sign are multiplied as words of 16 bits, others as bytes: AVX2
multiplies bytes without a sign with others and adds two products in 16 bits, which holds them as
long as one factor does not exceed 128. VNNI adds four products of bytes in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from kernels.linear.block_parts import MOST, is_long
from kernels.linear.integer_blocks.activations_with_llvm import FORMS, PER_STRETCH, Form, Layout
from kernels.linear.integer_blocks.integers_with_llvm import (
    BYTES,
    F32X8,
    I8X32,
    I16X16,
    I32X8,
    LongBlocks,
)
from kernels.linear.packed import BYTE_ZERO
from kernels.llvm import F32, Code, Value, vector
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
    scales: Sequence[Value] = (),
    first: int = 0,
) -> list[Value]:
    """i32 [8 n] for each row of x: in every lane the sum of all its parts, which come from part
    `first` on, times its scale.

    scales: those of lane_scales; none: the sums of products, offsets taken away.
    """
    n_parts = len(parts) // max(1, len(scales))
    totals: list[Value] = []
    for i, scale in enumerate(scales or [None]):
        some, at = parts[n_parts * i : n_parts * (i + 1)], first + n_parts * i
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
    totals = rows.first_sums(at)
    for k, part in enumerate(parts, at):
        fours = part.bits(vector(I16, part.type.count // 2))
        even, odd = (fours << 8).down_signed(8), fours.down_signed(8)
        # both words with a row before the next row's turn: four rows took 10 % less time (Zen 3)
        each = zip(totals, rows.integers(2 * k), rows.integers(2 * k + 1), strict=True)
        totals = [t + pair_sums(code, even, x) + pair_sums(code, odd, y) for t, x, y in each]
    return totals


def _dots_of_bytes(
    code: Code, form: Form, parts: Sequence[Value], rows: RowVectors, at: int, factor: Value | None
) -> list[Value]:
    """As _dots_of_words, of bytes without a sign, times a factor; sums in 16 bits as long as they
    fit."""
    assert form.most is not None
    at_once = _WORD // (2 * form.most * MOST)
    factor = factor or code.constant(I16X16, 1)
    totals = rows.first_sums(at)
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
    totals = rows.first_sums(at)
    for i, part in enumerate(parts, at):
        line = rows.integers(i)
        totals = [add_byte_sums(code, t, part, x) for t, x in zip(totals, line, strict=True)]
    return totals


def added(dots: Sequence[Value], factors: Sequence[Value], others: Sequence[Value]) -> list[Value]:
    """Sums i32 of groups as f32, times their scales and added to those of other groups: what there
    is of these."""
    exact = [dot.to_float(signed=True) for dot in dots]
    if factors:
        exact = [x * factor for x, factor in zip(exact, factors, strict=True)]
    # products of a scale of four bits are exact
    return [x + y for x, y in zip(exact, others, strict=True)] if others else exact


def in_words(type: str, *, vnni: int) -> bool:
    """Whether integers are multiplied as words. vnni: see kernels.processor.vnni_bits."""
    return FORMS[type].most is None and not vnni


def layout_for(type: str, together: int, *, vnni: int) -> Layout:
    """How rows of x are quantised for weights of a type, several of them together."""
    form, words = FORMS[type], in_words(type, vnni=vnni)
    # bytes with a sign lose it for VNNI
    offset = BYTE_ZERO if form.most is None and vnni else form.offset
    return Layout(is_long(type), form.lanes, words, together, offset, form.minimum, halves(vnni))


def halves(vnni: int) -> int:
    """Parts of a vector as long as those of AVX2."""
    return 2 if vnni > 8 * BYTES else 1


class RowVectors:
    """Quantised rows of x, of n neighbouring stretches at a time, as many as a vector has parts.

    filled: the rows of x, filled up with the last one to a power of two. lanes: the stretch and the
    row of x of each place in the sums of several vectors.
    """

    def __init__(self, code: Code, layout: Layout, start: Value) -> None:
        self._code, self._layout, self._record = code, layout, start
        self._n, self.count = layout.stretches, layout.together
        self.filled = [min(i, self.count - 1) for i in range(1 << (self.count - 1).bit_length())]
        self.lanes = [(part, r) for part in range(self._n) for r in self.filled]

    @property
    def offset(self) -> int:
        """The offset of weights."""
        return self._layout.offset

    def at(self, record: Value) -> RowVectors:
        """The rows as the record at an address has them."""
        return RowVectors(self._code, self._layout, record)

    def integers(self, line: int) -> list[Value]:
        """A line: i8 [32 n] or i16 [16 n]."""
        at = self._layout.line_step * line
        return self._vectors(at, I16X16 if self._layout.words else I8X32)

    def sums(self, side: int = 0) -> list[Value]:
        """Of integers: in short blocks times minus the offset, i32 [8 n], else i16 [16 n]."""
        at = self._layout.sums + self._layout.line_step * side
        return self._vectors(at, I16X16 if self._layout.long else I32X8)

    def scaled_sums(self) -> list[Value]:
        """ggml's sums of short blocks, f32 [8 n]."""
        return self._vectors(self._layout.scaled_sums, F32X8)

    def short_scales(self) -> list[Value]:
        """f32 [8 n]."""
        return self._vectors(self._layout.scales, F32X8)

    def long_scales(self) -> Value:
        """f32, for every lane."""
        at = self._record + self._layout.scales
        scales = self._code.load(at, vector(F32, self._layout.abreast))
        return scales.take([self._n * r + part for part, r in self.lanes])

    def first_sums(self, part: int) -> list[Value]:
        """i32 [8 n] for each row: what offsets of short blocks add to sums of products from a part
        on, negated."""
        if self.offset and not self._layout.long:
            return self.sums(part * self._layout.sides // PER_STRETCH)
        return [self._code.constant(vector(I32, PER_STRETCH * self._n), 0)] * self.count

    def _vectors(self, at: int, type: ir.VectorType) -> list[Value]:
        whole, step = vector(type.element, self._n * type.count), BYTES * self._n
        return [self._code.load(self._record + (at + step * r), whole) for r in range(self.count)]


_BITS = 256
_PAIRS = {_BITS: "llvm.x86.avx2.pmadd.wd", 2 * _BITS: "llvm.x86.avx512.pmaddw.d.512"}
_BYTE_PAIRS = {_BITS: "llvm.x86.avx2.pmadd.ub.sw", 2 * _BITS: "llvm.x86.avx512.pmaddubs.w.512"}


def pair_sums(code: Code, words: Value, factors: Value) -> Value:
    """i16 [16] times i16 [16], neighbours added: i32 [8]."""
    count = words.type.count
    return code.call(_PAIRS[16 * count], vector(I32, count // 2), words, factors)


def byte_pair_sums(code: Code, unsigned: Value, signed: Value) -> Value:
    """i8 [32] times i8 [32], the first without a sign, neighbours added: i16 [16].

    Exact as long as the unsigned ones do not exceed 128.
    """
    count = unsigned.type.count
    return code.call(_BYTE_PAIRS[8 * count], vector(I16, count // 2), unsigned, signed)


def add_byte_sums(code: Code, total: Value, unsigned: Value, signed: Value) -> Value:
    """total i32 [8], plus in each place four products of bytes; with VNNI only."""
    name = f"llvm.x86.avx512.vpdpbusd.{8 * unsigned.type.count}"
    return code.call(name, total.type, total, unsigned, signed)


def sums(vectors: Sequence[Value]) -> Value:
    """The sum ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of each eight elements of 1, 2, 4 or 8
    vectors of i32 or f32: those of the first eight of each vector, then those of the next."""
    count, parts = len(vectors), list(vectors)
    for _ in range(2):
        if len(parts) == 1:
            parts *= 2
        parts = [_neighbours(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    low, high = parts if count == 8 else (parts[0], parts[0])
    n, per_vector = low.type.count, min(count, 4)
    first = [
        start + side * n + i
        for start in range(0, n, 8)
        for side in range(count // per_vector)
        for i in range(per_vector)
    ]
    return low.take(first, high) + low.take([lane + 4 for lane in first], high)


def _neighbours(a: Value, b: Value) -> Value:
    """Neighbours added: of each four those of a, then those of b."""
    return a.take_in_fours([0, 2, 4, 6], b) + a.take_in_fours([1, 3, 5, 7], b)
