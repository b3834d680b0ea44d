"""Products of integers on processors that add four products of bytes at once (VNNI).

Rows of x become unsigned bytes around 128, as the instruction wants one side; what the 128 adds is
taken off again before the scales come in, so sums are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.linear.packed import ROW_LEVELS, Integers
from kernels.llvm import F32, F32X16, Code, Program, Value, has_feature, panels
from kernels.llvm.panels import I32X16, LINE, PANEL, TOGETHER
from kernels.llvm.values import I8, I32, vector

ROWS = 8
"""More rows of x than this many go in panels where the matrix allows it."""

# weight rows that a thread takes at a time
CHUNK = 256
# bytes; the processor's own prefetching starts anew with every row
AHEAD = 1024
ZERO = 128
# added to a number of up to 127, it leaves the nearest integer in the last bits of the sum
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
I8X64 = vector(I8, LINE)


def available() -> bool:
    """Whether this processor has the instruction."""
    return has_feature("avx512vnni")


def multiply(rows: torch.Tensor, scales: torch.Tensor, weight: Integers) -> torch.Tensor:
    """rows f32 [n, in] of numbers in -1 .. 1, each with a scale f32 [n, 1], times the weight.

    A row's numbers are rounded to 127ths. Returns f32 [n, out].
    """
    n_rows, n_in = rows.shape
    n_out = weight.scale.shape[0]
    line_bytes, threads = -(-n_in // LINE) * LINE, torch.get_num_threads()
    integers = torch.empty(n_rows, line_bytes, dtype=torch.uint8)
    _round_program(n_in)(
        rows.data_ptr(), integers.data_ptr(), tasks=n_rows, chunk=16, threads=threads
    )
    y = torch.empty(n_rows, n_out)
    last = weight.weight.data_ptr(), weight.scale.data_ptr(), y.data_ptr(), n_out
    if n_rows > ROWS and n_out >= TOGETHER and n_in == line_bytes:
        n_panels = -(-n_rows // PANEL)
        packed = torch.empty(n_panels * PANEL, n_in, dtype=torch.uint8)
        # one for every row of the last panel too
        scales = functional.pad(scales.flatten(), (0, n_panels * PANEL - n_rows))
        _pack_program()(
            integers.data_ptr(), n_rows, n_in, packed.data_ptr(),
            tasks=n_panels, chunk=1, threads=threads,
        )  # fmt: skip
        _panels_program(n_in)(
            packed.data_ptr(), scales.data_ptr(), n_rows, *last,
            tasks=-(-n_out // TOGETHER), chunk=1, threads=threads,
        )  # fmt: skip
        return y
    chunk = min(CHUNK, -(-n_out // (4 * threads)))
    for start in range(0, n_rows, ROWS):
        n = min(ROWS, n_rows - start)
        _rows_program(n, n_in)(
            integers.data_ptr() + start * line_bytes, scales.data_ptr() + 4 * start,
            *last[:2], last[2] + 4 * start * n_out, n_out,
            tasks=n_out, chunk=chunk, threads=threads,
        )  # fmt: skip
    return y


@functools.cache
def _round_program(n_in: int) -> Program:
    return Program(functools.partial(_round, n_in), 2)


@functools.cache
def _rows_program(n_rows: int, n_in: int) -> Program:
    return Program(functools.partial(_multiply_rows, n_rows, n_in), 6)


@functools.cache
def _pack_program() -> Program:
    return Program(_pack, 4)


@functools.cache
def _panels_program(n_in: int) -> Program:
    return Program(functools.partial(_multiply_panels, n_in), 7)


def _round(n_in: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Rows of numbers -> bytes in whole lines; what is behind the row meets no weight."""
    rows, out = args
    line_bytes = -(-n_in // LINE) * LINE
    with code.loop(first, last) as row:
        source, target = rows + row * (4 * n_in), out + row * line_bytes

        def put(at: Value, count: int) -> None:
            numbers = code.load_first(source + at * 4, F32X16, count) * float(ROW_LEVELS)
            integers = (numbers + _ROUND).bits(I32X16) - (_ROUND_BITS - ZERO)
            code.store(integers.resize(I8), target + at)

        whole = n_in - n_in % 16
        with code.loop(0, code.integer(whole), 16) as at:
            put(at, 16)
        if n_in > whole:
            put(code.integer(whole), n_in - whole)


def _dot(code: Code, total: Value, unsigned: Value, signed: Value) -> Value:
    """total i32 [16], plus in each place four products of bytes."""
    operands = (x.bits(I8X64) for x in (unsigned, signed))
    return code.call("llvm.x86.avx512.vpdpbusd.512", I32X16, total, *operands)


def _multiply_rows(
    n_rows: int, n_in: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Every weight row with all rows of x; its bytes are read once."""
    integers, scales, weight, weight_scales, y, n_out = args
    line_bytes = -(-n_in // LINE) * LINE
    zero, ones = code.constant(I32X16, 0), code.constant(I8X64, 1)
    whole = n_in - n_in % LINE
    with code.loop(first, last) as row:
        start = weight + row * n_in
        sums = [code.variable(zero) for _ in range(n_rows)]
        own = code.variable(zero)

        def add(at: Value, weights: Value) -> None:
            own.set(_dot(code, own.value, ones, weights))
            for r, total in enumerate(sums):
                x = code.load(integers + (r * line_bytes) + at, I8X64)
                total.set(_dot(code, total.value, x, weights))

        with code.loop(0, code.integer(whole), LINE) as at:
            code.prefetch(start + at + AHEAD)
            add(at, code.load(start + at, I8X64))
        if n_in > whole:
            add(code.integer(whole), code.load_first(start + whole, I8X64, n_in - whole))
        scale = code.load(weight_scales + row * 4, F32) * (1 / ROW_LEVELS)
        for r, total in enumerate(sums):
            result = code.sum(total.value - own.value * ZERO).to_float(signed=True)
            factor = scale * code.load(scales + 4 * r, F32)
            code.store(result * factor, y + (n_out * r + row) * 4)


def _pack(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    integers, n_rows, n_in, out = args

    def load(row: Value, at: Value) -> Value:
        return code.load(integers + row * n_in + at, I32X16)

    with code.loop(first, last) as panel:
        panels.pack(code, panel, n_rows, n_in, out, load)


def _multiply_panels(
    n_in: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    packed, scales, n_rows, weight, weight_scales, y, n_out = args
    zero, ones = code.constant(I32X16, 0), code.constant(I8X64, 1)
    # of the weight rows of a tile: what the zero of x adds to a sum, and the scale
    taken, kept = code.stack(4 * TOGETHER), code.stack(4 * TOGETHER)

    def write(row: Value, r: Value, to: Value) -> None:
        start, own = weight + row * n_in, code.variable(zero)
        with code.loop(0, code.integer(n_in), LINE) as at:
            code.prefetch(start + at + AHEAD)
            weights = code.load(start + at, I8X64)
            own.set(_dot(code, own.value, ones, weights))
            code.store(weights, to + at)
        code.store(code.sum(own.value) * ZERO, taken + r * 4)
        code.store(code.load(weight_scales + row * 4, F32) * (1 / ROW_LEVELS), kept + r * 4)

    def add(total: Value, weights: Value, column: Value) -> Value:
        return _dot(code, total, column, weights)

    def finish(total: Value, r: Value, panel: Value) -> Value:
        exact = total - code.splat(code.load(taken + r * 4, I32))
        factor = code.splat(code.load(kept + r * 4, F32)) * code.load(
            scales + panel * (4 * PANEL), F32X16
        )
        return exact.to_float(signed=True) * factor

    with code.loop(first, last) as tile:
        panels.multiply(
            code, tile, n_in, packed, n_rows, y, n_out,
            zero=zero, write=write, add=add, finish=finish,
        )  # fmt: skip
