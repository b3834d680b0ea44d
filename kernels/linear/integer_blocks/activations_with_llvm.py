"""Rows of x quantised for the kernels, as in kernels.linear.block_parts, in one buffer.

A row is filled up with zeros to whole stretches of 256 numbers. Several rows are stored together:
all that their products with a stretch of weights need is a record, and records are consecutive. A
record has

 * lines of 32 bytes: eight lanes of four integers int8, or two lines for them of two int16, the
   first and third of four, then the second and fourth; see `Layout.lanes`;
 * in short blocks, for weights stored with an offset: the negated sums of integers times that
   offset, i32 [8], those of every first half first if 16 neighbours have a lane;
 * in short blocks, for weights with minimums: ggml's sums of q8_1, f32 [8];
 * in long blocks, for both: sums of integers i16 [16];
 * scales f32, 8 of short blocks and one of a long one.

Each part is stored for all rows, row after row; records are aligned to cache lines. If a record has
several stretches, those of a row are stored one after the other like rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from kernels.linear.block_parts import GROUP, LONG, MOST, SHORT
from kernels.llvm import F32, F32X16, Code, Program, Value, vector
from kernels.llvm.functions import ROUND, ROUND_BITS, run, start
from kernels.llvm.values import I8, I16, I32, I32X16, MAGNITUDE

STRETCH = LONG
"""Numbers of a row whose products come to one number; see integer_linear_naive."""
LINE = 64
PART = 32
"""Bytes of a line of integers."""
PER_STRETCH = STRETCH // SHORT
"""Short blocks in a stretch, and lanes of a line."""

Length = TypeVar("Length", int, Value)

_WORD = 4


class Form(NamedTuple):
    """How a type's bytes stand for integers, and where.

    offset: what a byte is more than the integer. most: the largest byte; None where bytes have a
    sign. minimum: whether the type has minimums. group: elements with a scale of their own where
    these are fewer than a block's. lanes: which 32 neighbours, or 16 where there are 16 of them,
    each lane of four bytes holds, vector after vector: Layout.
    """

    offset: int
    most: int | None
    minimum: bool = False
    group: int | None = None
    lanes: tuple[int, ...] = tuple(range(PER_STRETCH))


def _sixteens(*parts: Sequence[int]) -> tuple[int, ...]:
    """Lanes of 16 neighbours: the first and the second ones of four 32, then of four others."""
    return tuple(2 * part + half for four in parts for half in (0, 1) for part in four)


_PAIRED, _HALVED, _CUT = (
    _sixteens((0, 2, 4, 6), (1, 3, 5, 7)),
    _sixteens((0, 1, 4, 5), (2, 3, 6, 7)),
    _sixteens((0, 1, 2, 3), (4, 5, 6, 7)),
)
# the first sixteens of all 32, then the second ones
_SPLIT = (*range(0, 16, 2), *range(1, 16, 2))

FORMS = {
    "Q4_0": Form(8, 15),
    "Q4_1": Form(0, 15, minimum=True),
    "Q5_0": Form(16, 31),
    "Q5_1": Form(0, 31, minimum=True),
    "Q8_0": Form(0, None),
    "IQ4_NL": Form(0, None),
    "MXFP4": Form(12, 24),
    "NVFP4": Form(12, 24, group=16, lanes=_SPLIT),
    "Q2_K": Form(0, 3, minimum=True, group=16, lanes=_CUT),
    "Q3_K": Form(4, 7, group=16, lanes=_CUT),
    "Q4_K": Form(0, 15, minimum=True, group=32, lanes=_PAIRED),
    "Q5_K": Form(0, 31, minimum=True, group=32, lanes=_PAIRED),
    "Q6_K": Form(32, 63, group=16, lanes=_HALVED),
    "IQ4_XS": Form(0, None, group=32, lanes=(0, 2, 4, 6, 1, 3, 5, 7)),
    "IQ3_S": Form(15, 30, group=32),
    "IQ3_XXS": Form(62, 124, group=32),
    "IQ2_S": Form(43, 86, group=16, lanes=_SPLIT),
    "IQ2_XS": Form(43, 86, group=16, lanes=_SPLIT),
    "IQ2_XXS": Form(43, 86, group=32),
    "IQ1_S": Form(9, 18, group=32),
    "IQ1_M": Form(9, 18, group=16, lanes=_SPLIT),
    "TQ2_0": Form(1, 3, group=32, lanes=_CUT),
    "TQ1_0": Form(1, 2, group=32, lanes=_SPLIT),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What the record of a stretch holds, and where: offsets are bytes from its start.

    long: blocks of x have 256 numbers, else 32. lanes: the group of 32 neighbours (of 16 if there
    are 16 lanes) in each lane. The fours of a lane are in successive lines; lines of the second 8
    lanes follow those of the first 8. Short blocks are in their order. words: integers have 16
    bits, else 8. together: rows in a record; stretches: of each of them. offset, minimums: of
    weights.
    """

    long: bool
    lanes: tuple[int, ...]
    words: bool = False
    together: int = 1
    offset: int = 0
    minimums: bool = False
    stretches: int = 1

    @property
    def abreast(self) -> int:
        """Stretches in a record, of all its rows."""
        return self.together * self.stretches

    @property
    def line_step(self) -> int:
        """Bytes from a line of a row to its next one."""
        return PART * self.abreast

    @property
    def sides(self) -> int:
        """Sums of integers in a short block."""
        return len(self.lanes) // PER_STRETCH

    @property
    def sums(self) -> int:
        """i32 [8] of short blocks, once for each 8 lanes, i16 [16] of a long one, for every row."""
        return self.line_step * STRETCH * (2 if self.words else 1) // PART

    @property
    def scaled_sums(self) -> int:
        """f32 [8] of short blocks for every row."""
        if self.long:
            return self.sums + self.line_step * bool(self.offset or self.minimums)
        return self.sums + self.line_step * self.sides * bool(self.offset)

    @property
    def scales(self) -> int:
        """f32 for every row, 8 of them for short blocks."""
        return self.scaled_sums + self.line_step * (self.minimums and not self.long)

    @property
    def record_bytes(self) -> int:
        scale_bytes = self.abreast * 4 * (1 if self.long else PER_STRETCH)
        return (self.scales + scale_bytes + (LINE - 1)) // LINE * LINE

    def tile_bytes(self, n_stretches: Length) -> Length:
        """Bytes of all the records of rows that stand together."""
        return (n_stretches + (self.stretches - 1)) // self.stretches * self.record_bytes

    def at(self, tile: Value, r: Value, stretch: Value) -> tuple[Value, Value]:
        """Where a stretch of row r of the tile is: its record, and its place abreast."""
        if self.stretches == 1:
            return tile + stretch * self.record_bytes, r
        record = tile + stretch // self.stretches * self.record_bytes
        return record, r * self.stretches + stretch % self.stretches

    def place(self, sixteen: int) -> tuple[int, int]:
        """The first four lines, from 0, and the lane of 16 neighbours."""
        if len(self.lanes) == PER_STRETCH:
            return sixteen % 2, self.lanes.index(sixteen // 2)
        return divmod(self.lanes.index(sixteen), PER_STRETCH)


def quantise(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The n rows of x f32 [..., in] in this layout, uint8 [tiles, tile_bytes]; in has whole blocks.

    Rows that are missing in the last tile are not written.
    """
    n_in = x.shape[-1]
    n_stretches = -(-n_in // STRETCH)
    n_rows = x.numel() // n_in if n_in else 0
    n_tiles = -(-n_rows // layout.together)
    out = torch.empty(n_tiles, layout.tile_bytes(n_stretches), dtype=torch.uint8)
    run(_program(layout), n_rows, n_in, (x,), n_in, out)
    return out


@functools.cache
def _program(layout: Layout) -> Program:
    return Program(functools.partial(write_rows, layout), 6)


def write_rows(
    layout: Layout, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: x in RowPlaces, how long its rows are, the buffer."""
    *x, n_in, out = args
    n_stretches = (n_in + (STRETCH - 1)) // STRETCH
    with code.loop(first, last) as row:
        source = start(x, row)
        if layout.together == 1:
            r, tile = code.integer(0), row
        else:
            r, tile = row % layout.together, row // layout.together
        target = out + tile * layout.tile_bytes(n_stretches)
        if layout.long:
            with code.loop(0, n_stretches) as block:
                _write_long(layout, code, source, *layout.at(target, r, block), block)
        else:
            n_blocks = n_in // SHORT
            with code.loop(0, n_blocks) as block:
                place = layout.at(target, r, block // PER_STRETCH)
                _write_short(layout, code, source, *place, block)
            with code.loop(n_blocks, n_stretches * PER_STRETCH) as block:
                place = layout.at(target, r, block // PER_STRETCH)
                _write_nothing(layout, code, *place, block)


def _write_long(
    layout: Layout, code: Code, source: Value, record: Value, r: Value, block: Value
) -> None:
    numbers = source + block * (4 * LONG)
    largest = _largest(code, [numbers + at for at in range(0, 4 * LONG, LINE)])
    factor = code.constant(F32, MOST) / largest
    many, lines = code.splat(factor), record + r * PART
    for i in range(LONG // GROUP):
        integers = _integers(code, code.load(numbers + LINE * i, F32X16), many)
        four_lines, lane = layout.place(i)
        _store(layout, code, integers, lines + _WORD * lane, four_lines)
        if layout.offset or layout.minimums:
            code.store(code.sum(integers).resize(I16), lines + (layout.sums + 2 * i))
    code.store(code.constant(F32, 1.0) / factor, record + layout.scales + r * 4)


def _write_short(
    layout: Layout, code: Code, source: Value, record: Value, r: Value, block: Value
) -> None:
    halves = [source + block * (4 * SHORT) + at for at in (0, LINE)]
    largest = _largest(code, halves)
    factor = code.splat(code.constant(F32, MOST) / largest)
    integers = [_integers(code, code.load(half, F32X16), factor) for half in halves]
    lane = record + r * PART + block % PER_STRETCH * _WORD
    for i, part in enumerate(integers):
        _store(layout, code, part, lane, i)
    scale, total = largest / float(MOST), [integers[0] + integers[1]]
    for i, part in enumerate(total if layout.sides == 1 else integers) if layout.offset else ():
        less = code.sum(part) * -layout.offset
        code.store(less, lane + (layout.sums + layout.line_step * i))
    if layout.minimums:
        scaled = (scale * code.sum(total[0]).to_float(signed=True)).rounded_to_f16()
        code.store(scaled, lane + layout.scaled_sums)
    code.store(scale.rounded_to_f16(), lane + layout.scales)


def _write_nothing(layout: Layout, code: Code, record: Value, r: Value, block: Value) -> None:
    lane = record + r * PART + block % PER_STRETCH * _WORD
    for i in range(SHORT // GROUP):
        _store(layout, code, code.constant(I32X16, 0), lane, i)
    for at in range(layout.sums, layout.scales + 1, layout.line_step):
        code.store(code.constant(I32, 0), lane + at)


def _store(layout: Layout, code: Code, integers: Value, lane: Value, four_lines: int) -> None:
    """Integers i32 [16]. lane: its address in the first line; four_lines: how many fours of lines
    of bytes are in front."""
    if layout.words:
        in_order = [4 * four + i for four in range(4) for i in (0, 2, 1, 3)]
        parts = integers.resize(I16).take(in_order).bits(vector(I32, 8))
    else:
        parts = integers.resize(I8).bits(vector(I32, 4))
    count = parts.type.count
    for i in range(count):
        code.store(parts.part(i, 1), lane + (four_lines * count + i) * layout.line_step)


def _largest(code: Code, addresses: Sequence[Value]) -> Value:
    """The largest magnitude of vectors f32 [16], by the bits, among which NaN's are the largest."""
    first, *others = (code.load(address, I32X16) & MAGNITUDE for address in addresses)
    for other in others:
        first = code.larger(first, other)
    return code.maximum(first).bits(F32)


def _integers(code: Code, x: Value, factor: Value) -> Value:
    """f32 [16] times a factor rounded to i32 [16], 0 where that is infinite or NaN."""
    steps = x * factor
    is_number = (steps.bits(I32X16) & MAGNITUDE).bits(F32X16).less(float("inf"))
    steps = code.choose(is_number, steps, code.constant(F32X16, 0.0))
    return (steps + ROUND).bits(I32X16) - ROUND_BITS
