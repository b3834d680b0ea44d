"""Few rows of x: each weight row is taken apart in registers and multiplied with all of them.

For one row this waits for memory alone. Integers of more than 7 bits and a sign are multiplied as
words of 16 bits, others as bytes: AVX2 multiplies bytes without a sign with others and adds two
products in 16 bits, which holds them as long as one factor does not exceed 128.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from kernels.dequant.decode_with_llvm import sizes
from kernels.integer_blocks.activations_with_llvm import STRETCH, Layout, quantise
from kernels.integer_blocks.integers_with_llvm import (
    BYTES,
    F32X8,
    FORMS,
    I8X32,
    I16X16,
    I32X8,
    PER_STRETCH,
    long_block,
    short_bytes,
    short_minimum,
    short_scale,
)
from kernels.integer_blocks.rows_of_integers import MOST, is_long
from kernels.integer_blocks.sums_with_llvm import (
    byte_pair_sums,
    float_sums,
    integer_sums,
    pair_sums,
)
from kernels.llvm import F32, Code, Program, Value, vector
from kernels.llvm.values import I8, I16, I32
from kernels.processor import has_feature

ROWS = 8
"""More rows of x than this many share no reading of the weights."""
# weight rows that a thread takes at a time
CHUNK = 256
# bytes; the processor's own prefetching starts anew with every row
AHEAD = 1024
_FOUR = 4


def has_vnni() -> bool:
    """Whether this processor adds products of bytes to 32 bits, 256 bits of them at a time."""
    return has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl"))


def in_words(type: str, *, vnni: bool) -> bool:
    """Whether integers are multiplied as words."""
    return FORMS[type].most is None and (is_long(type) or not vnni)


def multiply_rows(x: torch.Tensor, blocks: torch.Tensor, type: str, y: torch.Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] times the weight, n <= ROWS; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows = x.shape[0]
    threads, vnni = torch.get_num_threads(), has_vnni()
    layout = Layout(is_long(type), in_words(type, vnni=vnni))
    rows = quantise(x, layout)
    program(type, n_rows, vnni=vnni)(
        blocks.data_ptr(),
        row_bytes,
        rows.data_ptr(),
        y.data_ptr(),
        n_out,
        tasks=n_out,
        chunk=min(CHUNK, -(-n_out // (4 * threads))),
        threads=threads,
    )


@functools.cache
def program(type: str, n_rows: int, *, vnni: bool) -> Program:
    """Arguments: blocks, bytes of a row of them, rows as quantised, y, rows of weights in all."""
    return Program(functools.partial(write, type, n_rows, vnni), 5)


def write(
    type: str, n_rows: int, vnni: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program: rows of weights first .. last - 1."""
    blocks, row_bytes, x, y, n_out = args
    elements, n_bytes = sizes(type)
    stretch_bytes = n_bytes * (STRETCH // elements)
    n_stretches = (row_bytes + (stretch_bytes - 1)) // stretch_bytes
    whole = row_bytes // stretch_bytes
    layout = Layout(is_long(type), in_words(type, vnni=vnni))
    stretch = _LongStretch if layout.long else _ShortStretch
    rows = _Rows(code, layout, x, n_rows, n_stretches)
    rest = code.stack(stretch_bytes)
    for at in range(0, stretch_bytes, 2):
        code.store(code.constant(I16, 0), rest + at)
    with code.loop(first, last) as row:
        start = blocks + row * row_bytes
        if not layout.long:
            # blocks that are missing at the end of a row are zeros
            with code.loop(whole * stretch_bytes, row_bytes) as byte:
                code.store(code.load(start + byte, I8), rest + (byte - whole * stretch_bytes))
        totals = [code.variable(code.constant(vector(F32, _FOUR), 0.0)) for _ in rows.fours()]
        with code.loop(0, n_stretches) as b:
            there = start + b * stretch_bytes
            for line in range(0, stretch_bytes, 64):
                code.prefetch(there + (AHEAD + line))
            if not layout.long:
                there = code.choose(b.less(whole), there, rest)
            terms = stretch(code, type, vnni, there, rows, b).terms()
            for total, t in zip(totals, terms, strict=True):
                total.set(total.value + t)
        for r in range(n_rows):
            result = totals[r // _FOUR].value.part(r % _FOUR, 1)
            code.store(result, y + (n_out * r + row) * 4)


class _Rows:
    """Quantised rows of x."""

    def __init__(
        self, code: Code, layout: Layout, start: Value, count: int, n_stretches: Value
    ) -> None:
        self._code, self._layout, self.count = code, layout, count
        self._sums = layout.sums(n_stretches)
        self._scales = layout.scales(n_stretches)
        self._scaled_sums = layout.scaled_sums(n_stretches)
        stride = layout.row_bytes(n_stretches)
        self._starts = [start + stride * r for r in range(count)]

    def fours(self) -> Iterator[list[int]]:
        """The numbers of the rows, four at a time; the last four are filled up with the last."""
        for first in range(0, self.count, _FOUR):
            yield [min(first + i, self.count - 1) for i in range(_FOUR)]

    def bytes(self, r: int, b: Value, i: int) -> Value:
        """i8 [32], part i of stretch b."""
        at = self._starts[r] + b * self._layout.integers_step
        return self._code.load(at + BYTES * i, I8X32)

    def words(self, r: int, b: Value, i: int, half: int) -> Value:
        """i16 [16], half of part i of stretch b."""
        at = self._starts[r] + b * self._layout.integers_step
        return self._code.load(at + BYTES * (2 * i + half), I16X16)

    def sums(self, r: int, b: Value) -> Value:
        """i32 [8] of short blocks, i16 [16] of a long one."""
        at = self._starts[r] + self._sums + b * self._layout.sums_step
        return self._code.load(at, I16X16 if self._layout.long else I32X8)

    def scales(self, r: int, b: Value) -> Value:
        """f32 [8] of short blocks, f32 [1] of a long one."""
        at = self._starts[r] + self._scales + b * self._layout.scales_step
        return self._code.load(at, vector(F32, 1) if self._layout.long else F32X8)

    def scaled_sums(self, r: int, b: Value) -> Value:
        """f32 [8] of short blocks."""
        at = self._starts[r] + self._scaled_sums + b * self._layout.scales_step
        return self._code.load(at, F32X8)


class _ShortStretch:
    """Eight short blocks of a weight row."""

    def __init__(
        self, code: Code, type: str, vnni: bool, start: Value, rows: _Rows, b: Value
    ) -> None:
        self._code, self._vnni, self._rows, self._b = code, vnni, rows, b
        self._form, self._words = FORMS[type], in_words(type, vnni=vnni)
        n_bytes = sizes(type)[1]
        blocks = [start + n_bytes * i for i in range(PER_STRETCH)]
        self._scales = _joined(code, [short_scale(code, type, block) for block in blocks])
        self._minimums = None
        if self._form.minimum:
            self._minimums = _joined(code, [short_minimum(code, block) for block in blocks])
        self._bytes = [short_bytes(code, type, block) for block in blocks]
        self._offset = self._form.offset
        if self._form.most is None and not self._words:
            self._offset = 128
            self._bytes = [self._flipped(part) for part in self._bytes]

    def terms(self) -> Iterator[Value]:
        """f32 [4] for each four rows."""
        products = [self._products(r) for r in range(self._rows.count)]
        for four in self._rows.fours():
            yield float_sums([products[r] for r in four])

    def _products(self, r: int) -> Value:
        """f32 [8], of each block."""
        code, rows, b = self._code, self._rows, self._b
        most = 2 * MOST * (self._form.most or 0)
        integers = integer_sums(code, [self._dot(r, i) for i in range(PER_STRETCH)], most)
        if self._offset:
            integers = integers - rows.sums(r, b) * self._offset
        p = integers.to_float(signed=True) * (self._scales * rows.scales(r, b))
        if self._minimums is None:
            return p
        return code.fma(self._minimums, rows.scaled_sums(r, b), p)

    def _dot(self, r: int, i: int) -> Value:
        """Sums of products of block i, i16 [16] or i32 [8]."""
        code, rows, b, part = self._code, self._rows, self._b, self._bytes[i]
        if self._words:
            halves = [part.part(16 * half, 16).extended(I16) for half in range(2)]
            low, high = (
                pair_sums(code, words, rows.words(r, b, i, half))
                for half, words in enumerate(halves)
            )
            return low + high
        x = rows.bytes(r, b, i)
        if self._vnni:
            zero = code.constant(I32X8, 0)
            return code.call("llvm.x86.avx512.vpdpbusd.256", I32X8, zero, part, x)
        return byte_pair_sums(code, part, x)

    def _flipped(self, signed: Value) -> Value:
        """Bytes with a sign as bytes without, greater by 128."""
        return signed + self._code.constant(I8X32, -128)


class _LongStretch:
    """A long block of a weight row."""

    def __init__(
        self, code: Code, type: str, vnni: bool, start: Value, rows: _Rows, b: Value
    ) -> None:
        self._code, self._vnni, self._rows, self._b = code, vnni, rows, b
        self._form, self._block = FORMS[type], long_block(code, type, start)

    def terms(self) -> Iterator[Value]:
        """f32 [4] for each four rows."""
        code, block, rows, b = self._code, self._block, self._rows, self._b
        sums = self._sums()
        lesses = None
        if block.group_minimums is not None:
            minimums = self._sixteen(block.group_minimums)
            lesses = [pair_sums(code, minimums, rows.sums(r, b)) for r in range(rows.count)]
        for four in rows.fours():
            scales = [rows.scales(r, b) for r in four]
            x_scales = scales[0].beside(scales[1]).beside(scales[2].beside(scales[3]))
            dots = [sums[r] for r in four]
            others = dots if lesses is None else [lesses[r] for r in four]
            both = integer_sums(code, dots + others)
            both = both.to_float(signed=True)
            t = both.part(0, 4) * (code.splat(block.scale, 4) * x_scales)
            if block.minimum is not None:
                t = t - both.part(4, 4) * (code.splat(block.minimum, 4) * x_scales)
            yield t

    def _sums(self) -> list[Value]:
        """i32 [8] for each row, products times their group's scale."""
        code, block, rows, b = self._code, self._block, self._rows, self._b
        totals = [code.constant(I32X8, 0)] * rows.count
        if self._form.offset:
            scales = self._sixteen(block.group_scales) * -self._form.offset
            totals = [pair_sums(code, scales, rows.sums(r, b)) for r in range(rows.count)]
        factors = _Factors(code, block.group_scales)
        for i, part in enumerate(block.bytes):
            if self._form.most is None:
                words = [part.part(16 * half, 16).extended(I16) * factors[i] for half in range(2)]
                for r in range(rows.count):
                    for half in range(2):
                        x = rows.words(r, b, i, half)
                        totals[r] = self._add(totals[r], words[half], x)
            else:
                for r in range(rows.count):
                    pairs = byte_pair_sums(code, part, rows.bytes(r, b, i))
                    totals[r] = self._add(totals[r], pairs, factors[i])
        return totals

    def _add(self, total: Value, words: Value, factors: Value) -> Value:
        if self._vnni:
            name = "llvm.x86.avx512.vpdpwssd.256"
            return self._code.call(name, I32X8, total, words, factors)
        return total + pair_sums(self._code, words, factors)

    def _sixteen(self, groups: Value) -> Value:
        """i8, one for each group, as i16 [16], one for every 16 elements."""
        each = 16 // groups.type.count
        return groups.take([i // each for i in range(16)]).extended(I16)


class _Factors:
    """The scales of a long block as i16 [16] for each 32 elements, in the order of the products."""

    def __init__(self, code: Code, scales: Value) -> None:
        self._code, self._by_32 = code, scales.type.count == PER_STRETCH
        if self._by_32:
            # from memory, one fills a vector without a shuffle
            self._start = code.stack(4 * PER_STRETCH)
            code.store(scales.take([i // 2 for i in range(16)]).extended(I16), self._start)
        else:
            # each half of a vector shuffles within itself
            order = [*range(0, 16, 2), *range(1, 16, 2)]
            self._pairs = scales.take(order).extended(I16)

    def __getitem__(self, i: int) -> Value:
        if self._by_32:
            four = self._code.load(self._start + 4 * i, I32)
            return self._code.splat(four, 8).bits(I16X16)
        return self._pairs.take([i] * 8 + [8 + i] * 8)


def _joined(code: Code, numbers: Sequence[Value]) -> Value:
    """f32 [8] of eight f32."""
    parts = [code.splat(number, 1) for number in numbers]
    while len(parts) > 1:
        parts = [a.beside(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
