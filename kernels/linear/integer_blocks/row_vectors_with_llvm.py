"""How few rows of x lie, and as which vectors they meet those of weight rows."""

from __future__ import annotations

from llvmlite import ir

from kernels.linear.integer_blocks.activations_with_llvm import PER_STRETCH, Layout
from kernels.linear.integer_blocks.integers_with_llvm import (
    BYTES,
    F32X8,
    FORMS,
    I8X32,
    I16X16,
    I32X8,
)
from kernels.linear.integer_blocks.rows_of_integers import is_long
from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.values import I32

BYTE_ZERO = 128
"""What bytes with a sign are moved by where one factor of a product has none."""


def in_words(type: str, *, vnni: int) -> bool:
    """Whether integers are multiplied as words. vnni: see kernels.processor.vnni_bits."""
    return FORMS[type].most is None and not vnni


def layout_for(type: str, together: int, *, vnni: int) -> Layout:
    """How rows of x are quantised for weights of a type, so many of them together."""
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
    row of x of each place in the sums of so many vectors.
    """

    def __init__(self, code: Code, layout: Layout, start: Value) -> None:
        self._code, self._layout, self._record = code, layout, start
        self._n, self.count = layout.stretches, layout.together
        self.filled = [min(i, self.count - 1) for i in range(1 << (self.count - 1).bit_length())]
        self.lanes = [(part, r) for part in range(self._n) for r in self.filled]

    @property
    def offset(self) -> int:
        """Of weights."""
        return self._layout.offset

    def at(self, record: Value) -> RowVectors:
        """The rows as the record at an address has them."""
        return RowVectors(self._code, self._layout, record)

    def integers(self, line: int) -> list[Value]:
        """A line: i8 [32 n] or i16 [16 n]."""
        at = self._layout.line_step * line
        return self._vectors(at, I16X16 if self._layout.words else I8X32)

    def sums(self) -> list[Value]:
        """Of short blocks times the offset and negative, i32 [8 n]; of a long one i16 [16 n]."""
        return self._vectors(self._layout.sums, I16X16 if self._layout.long else I32X8)

    def scaled_sums(self) -> list[Value]:
        """f32 [8 n] of short blocks."""
        return self._vectors(self._layout.scaled_sums, F32X8)

    def short_scales(self) -> list[Value]:
        """f32 [8 n]."""
        return self._vectors(self._layout.scales, F32X8)

    def long_scales(self) -> Value:
        """f32, for every lane."""
        at = self._record + self._layout.scales
        scales = self._code.load(at, vector(F32, self._layout.abreast))
        return scales.take([self._n * r + part for part, r in self.lanes])

    def first_sums(self) -> list[Value]:
        """i32 [8 n] for each row: what offsets of short blocks add to sums of products, negated."""
        if self.offset and not self._layout.long:
            return self.sums()
        return [self._code.constant(vector(I32, PER_STRETCH * self._n), 0)] * self.count

    def _vectors(self, at: int, type: ir.VectorType) -> list[Value]:
        whole, step = vector(type.element, self._n * type.count), BYTES * self._n
        return [self._code.load(self._record + (at + step * r), whole) for r in range(self.count)]
