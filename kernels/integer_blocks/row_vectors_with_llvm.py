"""How few rows of x lie, and as which vectors they meet those of weight rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from kernels.integer_blocks.activations_with_llvm import PER_STRETCH, Layout
from kernels.integer_blocks.integers_with_llvm import BYTES, F32X8, FORMS, I8X32, I16X16, I32X8
from kernels.integer_blocks.rows_of_integers import is_long
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
    if halves(vnni) > 1 and together > 1:
        together += together % 2
    return Layout(is_long(type), form.lanes, words, together, offset, form.minimum)


def halves(vnni: int) -> int:
    """Parts of a vector as long as those of AVX2."""
    return 2 if vnni > 8 * BYTES else 1


class RowVectors:
    """Quantised rows of x, of one stretch at a time, and how they meet n weight rows.

    Vectors with n parts have one of a weight row in each. Where rows of x are paired, they have one
    of a row of x in each, and meet `sides` of those: each weight row in both parts.
    count: vectors of products, of all sides. lanes: the weight row and the row of x of each place
    in the sums of so many vectors, which are filled up with the last.
    """

    def __init__(self, code: Code, layout: Layout, n: int, start: Value) -> None:
        self._code, self._layout, self._start = code, layout, start
        self._n, self._paired = n, n > 1 and layout.together > 1
        self._record = start
        self._n_vectors = layout.together // n if self._paired else layout.together
        self.count = self._n_vectors * (n if self._paired else 1)
        self.filled = [min(i, self.count - 1) for i in range(1 << (self.count - 1).bit_length())]
        self.lanes = [self._lane(half, i) for half in range(n) for i in self.filled]

    def _lane(self, half: int, i: int) -> tuple[int, int]:
        if self._paired:
            w, pair = divmod(i, self._n_vectors)
            return w, self._n * pair + half
        return half, i

    @property
    def offset(self) -> int:
        """Of weights."""
        return self._layout.offset

    def go_to(self, b: Value) -> None:
        """Stretch b is read from here on."""
        self._record = self._start + b * self._layout.record_bytes

    def sides(self, weights: Value) -> list[Value]:
        """A vector with a part of each weight row, as rows of x meet it."""
        if not self._paired:
            return [weights]
        length = weights.type.count // self._n
        return [weights.part(length * w, length).times(self._n) for w in range(self._n)]

    def meet(self, weights: Value, rows: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
        """Each vector of products: weights and row of x."""
        for side in self.sides(weights):
            for row in rows:
                yield side, row

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
        together, at = self._layout.together, self._record + self._layout.scales
        scales = self._code.load(at, vector(F32, together))
        return scales.take([r for _, r in self.lanes])

    def first_sums(self) -> list[Value]:
        """i32 [8 n] for each vector of products: what offsets of short blocks add to sums of
        products, negated."""
        if self.offset and not self._layout.long:
            return self.sums() * (self.count // self._n_vectors)
        return [self._code.constant(vector(I32, PER_STRETCH * self._n), 0)] * self.count

    def _vectors(self, at: int, type: ir.VectorType) -> list[Value]:
        if self._paired:
            whole, step = vector(type.element, self._n * type.count), BYTES * self._n
            addresses = [self._record + (at + step * i) for i in range(self._n_vectors)]
            return [self._code.load(address, whole) for address in addresses]
        addresses = [self._record + (at + BYTES * i) for i in range(self._n_vectors)]
        return [self._code.load(address, type).times(self._n) for address in addresses]
