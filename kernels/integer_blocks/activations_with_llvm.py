"""Rows of x quantised for the kernels: kernels.integer_blocks.rows_of_integers, in one buffer.

A row is filled up with zeros to whole stretches of 256 numbers, K in all, and lies in memory as

 * integers, int8 [K], or int16 [K] where the product wants words;
 * in short blocks: scales f32 [K / 32], sums of integers i32 [K / 32], and ggml's sums of q8_1, f32
   [K / 32];
 * in long blocks: sums of integers i16 [K / 16], and scales f32 [K / 256];

rows begin on cache lines (`row_bytes` apart). What belongs to one stretch lies together in every
section. For products of few rows, the integers of the eight short blocks of a stretch stand beside
each other, "across": [8][block][4], fours of neighbours; as words [8][2][block][2], of each four
the first and third number, then the second and fourth. Of 32 words of a long block the even ones
come first then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from kernels.integer_blocks.rows_of_integers import GROUP, LONG, MOST, SHORT
from kernels.llvm import F32, F32X16, Code, Program, Value, vector
from kernels.llvm.rows import rows, run, start
from kernels.llvm.values import I8, I16, I32

STRETCH = LONG
"""Numbers of a row whose products come to one number; see kernels.integer_blocks.naive."""
LINE = 64

Length = TypeVar("Length", int, Value)

_I32X16 = vector(I32, 16)
_LANES = 16
_MAGNITUDE = 0x7FFFFFFF
# added to a number of up to 127, it leaves the nearest integer in the last bits of the sum
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
_PER_STRETCH = STRETCH // SHORT


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a row are. long: its blocks have 256 numbers, else 32. words: integers of
    16 bits, else 8. across: their order is the one for few rows.

    Offsets are bytes from the start of a row of n_stretches stretches to a section's part of the
    first stretch; `*_step` are bytes from one stretch to the next.
    """

    long: bool
    words: bool = False
    across: bool = False

    @property
    def integers_step(self) -> int:
        return STRETCH * (2 if self.words else 1)

    @property
    def scales_step(self) -> int:
        return 4 if self.long else 4 * _PER_STRETCH

    @property
    def sums_step(self) -> int:
        """i16 [16] of a long stretch, i32 [8] of a short one."""
        return 2 * (STRETCH // GROUP) if self.long else 4 * _PER_STRETCH

    def sums(self, n_stretches: Length) -> Length:
        return n_stretches * self.integers_step

    def scales(self, n_stretches: Length) -> Length:
        return n_stretches * (self.integers_step + self.sums_step)

    def scaled_sums(self, n_stretches: Length) -> Length:
        """Of short blocks: f32, as far apart as the scales, which they stand behind."""
        return n_stretches * (self.integers_step + self.sums_step + self.scales_step)

    def row_bytes(self, n_stretches: Length) -> Length:
        scaled = 0 if self.long else self.scales_step
        used = n_stretches * (self.integers_step + self.sums_step + self.scales_step + scaled)
        return (used + (LINE - 1)) // LINE * LINE


def quantise(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The n rows of x f32 [..., in] in this layout, uint8 [n, row_bytes]; in has whole blocks."""
    n_in = x.shape[-1]
    n_stretches = -(-n_in // STRETCH)
    x, places = rows(x)
    n_rows = x.numel() // n_in if n_in else 0
    out = torch.empty(n_rows, layout.row_bytes(n_stretches), dtype=torch.uint8)
    run(_program(layout), n_rows, n_in, *places, n_in, out.data_ptr())
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
        source, target = start(x, row), out + row * layout.row_bytes(n_stretches)
        if layout.long:
            with code.loop(0, n_stretches) as block:
                _write_long(layout, code, source, target, n_stretches, block)
        else:
            n_blocks = n_in // SHORT
            with code.loop(0, n_blocks) as block:
                _write_short(layout, code, source, target, n_stretches, block)
            with code.loop(n_blocks, n_stretches * _PER_STRETCH) as block:
                _write_nothing(layout, code, target, n_stretches, block)


def _write_long(
    layout: Layout, code: Code, source: Value, target: Value, n_stretches: Value, block: Value
) -> None:
    numbers = source + block * (4 * LONG)
    largest = _largest(code, [numbers + at for at in range(0, 4 * LONG, LINE)])
    factor = code.constant(F32, MOST) / largest
    many, sums = code.splat(factor), target + layout.sums(n_stretches) + block * layout.sums_step
    for i in range(LONG // _LANES):
        integers = _integers(code, code.load(numbers + LINE * i, F32X16), many)
        _store(layout, code, integers, target, block * LONG + _LANES * i)
        code.store(code.sum(integers).resize(I16), sums + 2 * i)
    scale = target + layout.scales(n_stretches) + block * layout.scales_step
    code.store(code.constant(F32, 1.0) / factor, scale)


def _write_short(
    layout: Layout, code: Code, source: Value, target: Value, n_stretches: Value, block: Value
) -> None:
    halves = [source + block * (4 * SHORT) + at for at in (0, LINE)]
    largest = _largest(code, halves)
    factor = code.splat(code.constant(F32, MOST) / largest)
    integers = [_integers(code, code.load(half, F32X16), factor) for half in halves]
    for i, part in enumerate(integers):
        _store(layout, code, part, target, block * SHORT + _LANES * i)
    scale, total = largest / float(MOST), code.sum(integers[0] + integers[1])
    code.store(total, target + layout.sums(n_stretches) + block * 4)
    code.store(scale.rounded_to_f16(), target + layout.scales(n_stretches) + block * 4)
    scaled = (scale * total.to_float(signed=True)).rounded_to_f16()
    code.store(scaled, target + layout.scaled_sums(n_stretches) + block * 4)


def _write_nothing(
    layout: Layout, code: Code, target: Value, n_stretches: Value, block: Value
) -> None:
    for at in range(0, SHORT, _LANES):
        _store(layout, code, code.constant(_I32X16, 0), target, block * SHORT + at)
    for section in (layout.sums, layout.scales, layout.scaled_sums):
        code.store(code.constant(I32, 0), target + section(n_stretches) + block * 4)


def _store(layout: Layout, code: Code, integers: Value, target: Value, index: Value) -> None:
    """The integers i32 [16] from `index` on."""
    if layout.across and layout.long:
        words = integers.resize(I16)
        place = target + (index - index % SHORT) * 2 + index % SHORT
        for parity in range(2):
            half = words.take(range(parity, _LANES, 2))
            code.store(half, place + SHORT * parity)
    elif layout.across:
        _store_across(layout, code, integers, target, index)
    elif layout.words:
        code.store(integers.resize(I16), target + index * 2)
    else:
        code.store(integers.resize(I8), target + index)


def _store_across(layout: Layout, code: Code, integers: Value, target: Value, index: Value) -> None:
    block, half = index // SHORT, index % SHORT // _LANES
    place = target + block // _PER_STRETCH * layout.integers_step + block % _PER_STRETCH * 4
    if layout.words:
        in_order = [4 * four + i for four in range(4) for i in (0, 2, 1, 3)]
        parts = integers.resize(I16).take(in_order).bits(vector(I32, 8))
    else:
        parts = integers.resize(I8).bits(vector(I32, 4))
    count = parts.type.count
    for i in range(count):
        code.store(parts.part(i, 1), place + (half * count + i) * (4 * _PER_STRETCH))


def _largest(code: Code, addresses: Sequence[Value]) -> Value:
    """The largest magnitude of vectors f32 [16], by the bits, among which NaN's are the largest."""
    first, *others = (code.load(address, _I32X16) & _MAGNITUDE for address in addresses)
    for other in others:
        first = code.larger(first, other)
    return code.maximum(first).bits(F32)


def _integers(code: Code, x: Value, factor: Value) -> Value:
    """f32 [16] times a factor rounded to i32 [16], 0 where that is infinite or NaN."""
    steps = x * factor
    is_number = (steps.bits(_I32X16) & _MAGNITUDE).bits(F32X16).less(float("inf"))
    steps = code.choose(is_number, steps, code.constant(F32X16, 0.0))
    return (steps + _ROUND).bits(_I32X16) - _ROUND_BITS
