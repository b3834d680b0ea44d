"""Few rows of x: each weight row is taken apart in registers and multiplied with all of them.

For one row this waits for memory alone. Integers of more than 7 bits and a sign are multiplied as
words of 16 bits, others as bytes: AVX2 multiplies bytes without a sign with others and adds two
products in 16 bits, which holds them as long as one factor does not exceed 128.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.dequant.decode_with_llvm import sizes
from kernels.integer_blocks.activations_with_llvm import LINE, STRETCH, Layout, write_rows
from kernels.integer_blocks.integers_with_llvm import (
    BYTES,
    F32X8,
    FORMS,
    I8X32,
    I16X16,
    I32X8,
    PER_STRETCH,
    Form,
    LongBlock,
    joined,
    long_block,
    short_blocks,
)
from kernels.integer_blocks.rows_of_integers import MOST, is_long
from kernels.integer_blocks.sums_with_llvm import (
    add_byte_sums,
    add_pair_sums,
    byte_pair_sums,
    pair_sums,
    sums,
)
from kernels.llvm import F32, Code, Program, Value, vector
from kernels.llvm.values import I8, I16, I32, I64
from kernels.processor import has_feature

ROWS = 8
"""More rows of x than this many share no reading of the weights."""
# weight rows that a thread takes at a time
CHUNK = 256
# bytes; the processor's own prefetching starts anew with every row
AHEAD = 2048
# bytes of weights times rows that are done before a second thread has woken up
ALONE = 1 << 16
_WORD = 2**15 - 1


def has_vnni() -> bool:
    """Whether this processor adds products of bytes to 32 bits, 256 bits of them at a time."""
    return has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl"))


def in_words(type: str, *, vnni: bool) -> bool:
    """Whether integers are multiplied as words."""
    return FORMS[type].most is None and (is_long(type) or not vnni)


def layout_for(type: str, *, vnni: bool) -> Layout:
    """How rows of x are quantised for weights of a type."""
    words = in_words(type, vnni=vnni)
    return Layout(is_long(type), words, across=words or not is_long(type))


def multiply_rows(x: torch.Tensor, blocks: torch.Tensor, type: str, y: torch.Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] times the weight, n <= ROWS; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads = torch.get_num_threads()
    run, n_bytes = _prepared(type, n_rows, n_in)
    rows = torch.empty(n_bytes, dtype=torch.uint8)
    args = (x.data_ptr(), n_in, rows.data_ptr(), blocks.data_ptr(), row_bytes, y.data_ptr(), n_out)
    if threads == 1 or blocks.numel() * n_rows <= ALONE:
        run.alone(n_out, *args)
    else:
        run(*args, tasks=n_out, chunk=min(CHUNK, -(-n_out // (4 * threads))), threads=threads)


@functools.cache
def _prepared(type: str, n_rows: int, n_in: int) -> tuple[Program, int]:
    """The program, and the bytes of so many quantised rows."""
    vnni = has_vnni()
    row_bytes = layout_for(type, vnni=vnni).row_bytes(-(-n_in // STRETCH))
    return program(type, n_rows, vnni=vnni), n_rows * row_bytes


@functools.cache
def program(type: str, n_rows: int, *, vnni: bool) -> Program:
    """Arguments: x, how long its rows are, room for them quantised, blocks, bytes of a row of
    them, y, rows of weights."""
    layout = layout_for(type, vnni=vnni)
    body = functools.partial(write, type, n_rows, vnni)
    # one call for both: rows are ready before other threads have woken up
    return Program(body, 7, functools.partial(_quantise, layout, n_rows))


def _quantise(layout: Layout, n_rows: int, code: Code, args: Sequence[Value]) -> None:
    x, n_in, rows, *_ = args
    places = (x, code.integer(1), n_in * 4, code.integer(0))
    write_rows(layout, code, [*places, n_in, rows], code.integer(0), code.integer(n_rows))


def write(
    type: str, n_rows: int, vnni: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program: rows of weights first .. last - 1. Arguments: see `program`."""
    _, _, x, blocks, row_bytes, y, n_out = args
    elements, n_bytes = sizes(type)
    stretch_bytes = n_bytes * (STRETCH // elements)
    n_stretches = (row_bytes + (stretch_bytes - 1)) // stretch_bytes
    layout = layout_for(type, vnni=vnni)
    rows = _Rows(code, layout, x, n_rows, n_stretches)
    terms = _long_terms if layout.long else _short_terms
    zero = code.constant(vector(F32, len(rows.lanes)), 0.0)
    rest = None if layout.long else _Rest(code, row_bytes, stretch_bytes)
    with code.loop(first, last) as row:
        start = blocks + row * row_bytes
        if rest:
            rest.copy(start)
        total = code.variable(zero)
        with code.loop(0, n_stretches) as b:
            there = start + b * stretch_bytes
            for line in range(0, stretch_bytes, LINE):
                code.prefetch(there + (AHEAD + line))
            block = rest.instead(there, b) if rest else there
            total.set(total.value + terms(code, type, vnni, block, rows, b))
        for r in range(n_rows):
            code.store(total.value.part(r, 1), y + (n_out * r + row) * 4)


class _Rest:
    """What a row of weights has beyond whole stretches, as a stretch that ends with zeros."""

    def __init__(self, code: Code, row_bytes: Value, stretch_bytes: int) -> None:
        self._code, self._row_bytes, self._stretch_bytes = code, row_bytes, stretch_bytes
        self._whole = row_bytes // stretch_bytes
        self._memory = code.stack(stretch_bytes)
        for at in range(0, stretch_bytes, 8):
            code.store(code.constant(I64, 0), self._memory + at)

    def copy(self, row: Value) -> None:
        """Take the rest of the row at an address."""
        begin = self._whole * self._stretch_bytes
        with self._code.loop(begin, self._row_bytes) as at:
            self._code.store(self._code.load(row + at, I8), self._memory + (at - begin))

    def instead(self, stretch: Value, b: Value) -> Value:
        """The address of stretch b, which is at `stretch` if it is whole."""
        return self._code.choose(b.less(self._whole), stretch, self._memory)


class _Rows:
    """Quantised rows of x.

    lanes: the row in each place of a vector, a power of two of them; the last fill it up.
    """

    def __init__(
        self, code: Code, layout: Layout, start: Value, count: int, n_stretches: Value
    ) -> None:
        self._code, self._layout, self.count = code, layout, count
        self.lanes = [min(r, count - 1) for r in range(1 << (count - 1).bit_length())]
        self._sums = layout.sums(n_stretches)
        self._scales = layout.scales(n_stretches)
        self._scaled_sums = layout.scaled_sums(n_stretches)
        stride = layout.row_bytes(n_stretches)
        self._starts = [start + stride * r for r in range(count)]

    def integers(self, r: int, b: Value, i: int) -> Value:
        """Line i of 32 bytes of stretch b: i8 [32] or i16 [16]."""
        at = self._starts[r] + b * self._layout.integers_step
        return self._code.load(at + BYTES * i, I16X16 if self._layout.words else I8X32)

    def sums(self, r: int, b: Value) -> Value:
        """i32 [8] of short blocks, i16 [16] of a long one."""
        at = self._starts[r] + self._sums + b * self._layout.sums_step
        return self._code.load(at, I16X16 if self._layout.long else I32X8)

    def scales(self, r: int, b: Value) -> Value:
        """f32 [8] of short blocks, f32 of a long one."""
        at = self._starts[r] + self._scales + b * self._layout.scales_step
        return self._code.load(at, F32 if self._layout.long else F32X8)

    def scaled_sums(self, r: int, b: Value) -> Value:
        """f32 [8] of short blocks."""
        at = self._starts[r] + self._scaled_sums + b * self._layout.scales_step
        return self._code.load(at, F32X8)


def _short_terms(code: Code, type: str, vnni: bool, stretch: Value, rows: _Rows, b: Value) -> Value:
    """t of kernels.integer_blocks.naive for each lane of rows: eight blocks of a weight row."""
    blocks = [stretch + sizes(type)[1] * i for i in range(PER_STRETCH)]
    form, weights = FORMS[type], short_blocks(code, type, blocks)
    if in_words(type, vnni=vnni):
        dots, offset = _dots_of_words(code, weights.bytes, rows, b), 0
    elif vnni:
        dots, offset = _dots_with_vnni(code, type, weights.bytes, rows, b)
    else:
        dots, offset = _dots_of_bytes(code, form, weights.bytes, rows, b), form.offset
    products = []
    for r, integers in enumerate(dots):
        if offset:
            integers = integers - rows.sums(r, b) * offset
        p = integers.to_float(signed=True) * (weights.scales * rows.scales(r, b))
        if weights.minimums is not None:
            p = code.fma(weights.minimums, rows.scaled_sums(r, b), p)
        products.append(p)
    return sums([products[r] for r in rows.lanes])


def _dots_of_words(code: Code, parts: Sequence[Value], rows: _Rows, b: Value) -> list[Value]:
    """i32 [8] for each row: the sums of products in each block, of bytes with a sign."""
    totals = [code.constant(I32X8, 0)] * rows.count
    for k, part in enumerate(parts):
        fours = part.bits(I16X16)
        for i, words in enumerate(((fours << 8).down_signed(8), fours.down_signed(8))):
            for r in range(rows.count):
                x = rows.integers(r, b, 2 * k + i)
                totals[r] = totals[r] + pair_sums(code, words, x)
    return totals


def _dots_of_bytes(
    code: Code, form: Form, parts: Sequence[Value], rows: _Rows, b: Value
) -> list[Value]:
    """As _dots_of_words, of bytes without a sign; sums in 16 bits as long as they fit."""
    assert form.most is not None
    at_once = _WORD // (2 * form.most * MOST)
    ones, totals = code.constant(I16X16, 1), [code.constant(I32X8, 0)] * rows.count
    for k in range(0, len(parts), at_once):
        words = [code.constant(I16X16, 0)] * rows.count
        for i in range(k, min(k + at_once, len(parts))):
            for r in range(rows.count):
                words[r] = words[r] + byte_pair_sums(code, parts[i], rows.integers(r, b, i))
        totals = [t + pair_sums(code, w, ones) for t, w in zip(totals, words, strict=True)]
    return totals


def _dots_with_vnni(
    code: Code, type: str, parts: Sequence[Value], rows: _Rows, b: Value
) -> tuple[list[Value], int]:
    """As _dots_of_words, and what every byte was more than its integer."""
    form, offset = FORMS[type], FORMS[type].offset
    if form.most is None:
        offset = 128
        parts = [part + code.constant(I8X32, -offset) for part in parts]
    totals = [code.constant(I32X8, 0)] * rows.count
    for i, part in enumerate(parts):
        for r in range(rows.count):
            totals[r] = add_byte_sums(code, totals[r], part, rows.integers(r, b, i))
    return totals, offset


def _long_terms(code: Code, type: str, vnni: bool, block: Value, rows: _Rows, b: Value) -> Value:
    """t of kernels.integer_blocks.naive for each lane of rows: a block of a weight row."""
    weights, count = long_block(code, type, block), len(rows.lanes)
    dots = _scaled_dots(code, FORMS[type], weights, rows, b, vnni=vnni)
    minimums = []
    if weights.group_minimums is not None:
        factors = _sixteen(weights.group_minimums)
        minimums = [pair_sums(code, factors, rows.sums(r, b)) for r in range(rows.count)]
    vectors = [dots[r] for r in rows.lanes] + [minimums[r] for r in rows.lanes if minimums]
    exact = [sums(vectors[i : i + 8]).to_float(signed=True) for i in range(0, len(vectors), 8)]
    x_scales = joined(code, [rows.scales(r, b) for r in rows.lanes])
    t = exact[0].part(0, count) * (code.splat(weights.scale, count) * x_scales)
    if weights.minimum is None:
        return t
    less = exact[-1].part(exact[-1].type.count - count, count)
    return t - less * (code.splat(weights.minimum, count) * x_scales)


def _scaled_dots(
    code: Code, form: Form, weights: LongBlock, rows: _Rows, b: Value, *, vnni: bool
) -> list[Value]:
    """i32 [8] for each row, to be added up: products times the scale of their group."""
    add = functools.partial(add_pair_sums, code, vnni=vnni)
    totals = [code.constant(I32X8, 0)] * rows.count
    if form.offset:
        factors = _sixteen(weights.group_scales) * -form.offset
        totals = [pair_sums(code, factors, rows.sums(r, b)) for r in range(rows.count)]
    scales = _Scales(code, weights.group_scales, 8 if form.most is None else 0)
    for i, part in enumerate(weights.bytes):
        scale = scales[i]
        if form.most is None:
            # even and odd bytes times 256, as are the scales: upper halves are their products
            halves = part.bits(I16X16)
            for parity, above in enumerate((halves << 8, halves & -256)):
                words = code.call("llvm.x86.avx2.pmulh.w", I16X16, above, scale)
                for r in range(rows.count):
                    totals[r] = add(totals[r], words, rows.integers(r, b, 2 * i + parity))
        else:
            for r in range(rows.count):
                pairs = byte_pair_sums(code, part, rows.integers(r, b, i))
                totals[r] = add(totals[r], pairs, scale)
    return totals


def _sixteen(groups: Value) -> Value:
    """i8, one for each group of a long block, as i16 [16], one for every 16 elements."""
    each = 16 // groups.type.count
    return groups.take([i // each for i in range(16)]).extended(I16)


class _Scales:
    """The scales of a long block as i16 [16] for each 32 elements, in the order of the products."""

    def __init__(self, code: Code, scales: Value, up: int) -> None:
        """up: bits that they are moved up by, for groups of 32."""
        self._code, self._by_32 = code, scales.type.count == PER_STRETCH
        if self._by_32:
            # from memory, one fills a vector without a shuffle
            self._start = code.stack(4 * PER_STRETCH)
            code.store(_sixteen(scales) << up, self._start)
        else:
            # each half of a vector shuffles within itself
            order = [*range(0, 16, 2), *range(1, 16, 2)]
            self._pairs = scales.take(order).extended(I16)

    def __getitem__(self, i: int) -> Value:
        if self._by_32:
            four = self._code.load(self._start + 4 * i, I32)
            return self._code.splat(four, 8).bits(I16X16)
        return self._pairs.take([i] * 8 + [8 + i] * 8)
