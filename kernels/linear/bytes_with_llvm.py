"""Integer products of rows of x with a weight in BytePanels, for few rows and for many."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.integer_blocks.row_products_with_llvm import add_byte_sums
from kernels.linear.packed import (
    BYTE_ZERO,
    INPUTS_PER_LANE,
    PANEL_OUTPUTS,
    ROW_LEVELS,
    ROW_MULTIPLE,
    SECOND_ROW_STEPS,
    BytePanels,
)
from kernels.llvm import F32, F32X16, Code, Program, Value, kernel, vector
from kernels.llvm.functions import ROUND, ROUND_BITS, RowPlaces, addresses, rows, run, start
from kernels.llvm.values import I8, I32, I32X16, MAGNITUDE

FEW_ROWS = 8
"""Up to this many rows of integers are multiplied with one panel after the other, and the weights
read once; more are multiplied with WIDE panels at a time."""

# panels, and rows of integers, whose sums are in registers at the same time
WIDE, TALL = 2, (12, 8, 4, 2, 1)
# stretches of panels that a thread takes at a time, for every thread: as long as can be, since
# memory is faster the longer it is read in order
STRETCHES = 2
# products that are done before a second thread has woken up
ALONE = 1 << 18
_NO_ROWS = (0, 1, 0, 0)


def linear(x: Tensor, n_integers: int, panels: BytePanels, n_out: int) -> Tensor:
    """x f32 [..., in] -> f32 [..., n_out], each row as one row of integers or as two."""
    n_in, y = x.shape[-1], torch.empty(*x.shape[:-1], n_out)
    n_rows = x.numel() // n_in
    if n_rows * n_integers > FEW_ROWS:
        _run_many(quantise(x, n_integers), n_integers, panels, y)
    elif n_rows:
        integers = torch.empty(n_rows * row_bytes(n_in, n_integers), dtype=torch.uint8)
        # one call for both: the rows may be ready before other threads have woken up
        x, places = whole_rows(x)
        _run_few(n_rows, integers, n_integers, panels, y, places)
    return y


def product(integers: Tensor, n_integers: int, panels: BytePanels, n_out: int) -> Tensor:
    """Rows that `quantise` has made [n, row_bytes] -> f32 [n, n_out]."""
    n_rows = len(integers)
    y = torch.empty(n_rows, n_out)
    if n_rows * n_integers > FEW_ROWS:
        _run_many(integers, n_integers, panels, y)
    elif n_rows:
        _run_few(n_rows, integers, n_integers, panels, y)
    return y


def _run_few(
    n_rows: int,
    integers: Tensor,
    n_integers: int,
    panels: BytePanels,
    y: Tensor,
    places: RowPlaces | None = None,
) -> None:
    """places: of rows of x that become the integers before."""
    weights, threads = panels.bytes, torch.get_num_threads()
    n_panels, stretches = weights.shape[0], STRETCHES * threads
    if weights.numel() * n_rows <= ALONE:
        stretches = 1
    _few(n_rows, n_integers)(
        *(places or _NO_ROWS),
        _n_in(panels),
        integers.data_ptr(),
        n_rows if places else 0,
        *addresses(weights, panels.scales, y),
        y.shape[-1],
        tasks=n_panels,
        chunk=-(-n_panels // stretches),
        threads=threads,
    )


def _run_many(integers: Tensor, n_integers: int, panels: BytePanels, y: Tensor) -> None:
    weights, threads = panels.bytes, torch.get_num_threads()
    n_tiles = -(-weights.shape[0] // WIDE)
    _many(n_integers)(
        integers.data_ptr(),
        integers.shape[0],
        _n_in(panels),
        *addresses(weights, panels.scales, y),
        y.shape[-1],
        tasks=n_tiles,
        chunk=-(-n_tiles // (4 * threads)),
        threads=threads,
    )


def _n_in(panels: BytePanels) -> int:
    return panels.bytes.shape[1] * INPUTS_PER_LANE


@functools.cache
def _few(n_rows: int, n_integers: int) -> Program:
    def before(code: Code, args: Sequence[Value]) -> None:
        write_rows(n_integers, code, args[:6], code.integer(0), args[6])

    return Program(functools.partial(_few_body, n_rows, n_integers), 11, before)


def _few_body(
    n_rows: int, n_integers: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: those of write_rows, how many rows it writes, bytes and scales, y, its width."""
    n_in, integers, _, weights, scales, y, n_out = args[4:]
    at_once = max(1, 4 // (n_rows * n_integers))
    with code.loop(first, last) as panel:
        start = weights + panel * n_in * PANEL_OUTPUTS
        (results,) = multiply(code, integers, n_rows, n_integers, n_in, [start], at_once)
        store(code, results, panel, scales, y, n_out)


@kernel(7)
def _many(code: Code, args: Sequence[Value], tile: Value, n_integers: int) -> None:
    integers, n_rows, n_in, weights, scales, y, n_out = args
    row_bytes = n_in * n_integers + TAIL_BYTES
    final = (n_out + (PANEL_OUTPUTS - 1)) // PANEL_OUTPUTS - 1
    # after the last panel comes the last once more, with the same results
    panels = [code.smaller(tile * WIDE + i, final) for i in range(WIDE)]
    starts = [weights + panel * n_in * PANEL_OUTPUTS for panel in panels]
    begin = code.integer(0)
    for tall in (t // n_integers for t in TALL if t >= n_integers):
        end = n_rows - (n_rows - begin) % tall
        with code.loop(begin, end, tall) as row:
            rows, to = integers + row * row_bytes, y + row * n_out * 4
            found = multiply(code, rows, tall, n_integers, n_in, starts)
            for panel, results in zip(panels, found, strict=True):
                store(code, results, panel, scales, to, n_out)
        begin = end


AHEAD = 2048
"""Bytes to the weights that are asked for: the CPU's own prefetching is later."""
# bytes of a panel that are multiplied together
LINE = PANEL_OUTPUTS * INPUTS_PER_LANE
I8X64 = vector(I8, LINE)


def multiply(
    code: Code,
    x: Value,
    n_rows: int,
    n_integers: int,
    n_in: Value,
    panels: Sequence[Value],
    at_once: int = 1,
) -> list[list[Value]]:
    """Results f32 [16] of each panel, of every row in turn; the scales of weights are missing.

    x: rows of n_integers rows of bytes, one after the other. panels: their addresses. at_once:
    fours of inputs with sums of their own, since a processor begins some products before the
    first is done.
    """
    stride, zero = n_in * n_integers + TAIL_BYTES, code.constant(I32X16, 0)
    rows = [x + stride * r for r in range(n_rows)]
    starts = [row + n_in * i for row in rows for i in range(n_integers)]
    sums = [[[code.variable(zero) for _ in range(at_once)] for _ in starts] for _ in panels]
    with code.loop(0, n_in, INPUTS_PER_LANE * at_once) as at:
        for step in range(at_once):
            lines = [panel + at * PANEL_OUTPUTS + LINE * step for panel in panels]
            for line in lines:
                code.prefetch(line + AHEAD)
            weights = [code.load(line, I8X64) for line in lines]
            for r, start in enumerate(starts):
                four = code.splat(code.load(start + at + INPUTS_PER_LANE * step, I32)).bits(I8X64)
                for totals, weight in zip(sums, weights, strict=True):
                    total = totals[r][step]
                    total.set(add_byte_sums(code, total.value, weight, four))
    found = []
    for totals in sums:
        exact = [_added(total.value for total in parts) for parts in totals]
        found.append(
            [
                _result(code, exact[r * n_integers : (r + 1) * n_integers], row + n_in * n_integers)
                for r, row in enumerate(rows)
            ]
        )
    return found


def store(
    code: Code, results: Sequence[Value], panel: Value, scales: Value, y: Value, n_out: Value
) -> None:
    """The results of a panel to as many rows of y f32 [.., n_out], as far as there are outputs."""
    column = panel * PANEL_OUTPUTS
    scale = code.load(scales + column * 4, F32X16)
    results = [result * scale for result in results]
    to, left = y + column * 4, n_out - column
    with code.when(code.integer(PANEL_OUTPUTS - 1).less(left)):
        for r, result in enumerate(results):
            code.store(result, to + n_out * (4 * r))
    with code.when(left.less(PANEL_OUTPUTS)):
        kept = code.stack(4 * PANEL_OUTPUTS * len(results))
        for r, result in enumerate(results):
            code.store(result, kept + 4 * PANEL_OUTPUTS * r)
        with code.loop(0, code.integer(len(results))) as row, code.loop(0, left) as i:
            number = code.load(kept + (row * PANEL_OUTPUTS + i) * 4, F32)
            code.store(number, to + (row * n_out + i) * 4)


def _added(parts: Iterable[Value]) -> Value:
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _result(code: Code, sums: Sequence[Value], tail: Value) -> Value:
    """The result of a row of x, from the sums of its rows of integers."""
    numbers = [
        (total - code.splat(code.load(tail + 4 * i, I32))).to_float(signed=True)
        for i, total in enumerate(sums)
    ]
    if len(numbers) == 2:
        high, low = numbers
        numbers = [low / float(SECOND_ROW_STEPS) + high]
    return numbers[0] * code.splat(code.load(tail + 4 * len(sums), F32))


TAIL_BYTES = 64
"""Bytes after the integers: BYTE_ZERO times the sum of each row of them, i32, then the largest
magnitude of the row of x, f32; this many so that rows do not all fall into the same few lines of
the cache."""

_TINY_BITS = 0x00800000


def row_bytes(n_in: int, n_integers: int) -> int:
    """Bytes of a rounded row of n_in numbers. n_integers: rows of integers made of it, 1 or 2."""
    return (n_in + -n_in % ROW_MULTIPLE) * n_integers + TAIL_BYTES


def whole_rows(x: Tensor) -> tuple[Tensor, RowPlaces]:
    """x f32 [..., in], its rows filled up to a multiple of ROW_MULTIPLE, and where they are."""
    filling = -x.shape[-1] % ROW_MULTIPLE
    return rows(functional.pad(x, (0, filling)) if filling else x)


def quantise(x: Tensor, n_integers: int) -> Tensor:
    """The n rows of x f32 [..., in] as integers with their tails, uint8 [n, row_bytes]."""
    n_in = x.shape[-1]
    n_rows = x.numel() // n_in
    out = torch.empty(n_rows, row_bytes(n_in, n_integers), dtype=torch.uint8)
    x, places = whole_rows(x)
    run(_program(n_integers), n_rows, x.shape[-1], *places, x.shape[-1], out.data_ptr())
    return out


@functools.cache
def _program(n_integers: int) -> Program:
    return Program(functools.partial(write_rows, n_integers), 6)


def write_rows(
    n_integers: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: x in RowPlaces, how long its rows are, the bytes.

    The largest magnitude of a row that is not all numbers is NaN, as all its results become then.
    """
    *x, n_in, out = args
    n_bytes = n_in * n_integers + TAIL_BYTES
    with code.loop(first, last) as row:
        source, target = start(x, row), out + row * n_bytes
        largest = _largest(code, source, n_in)
        divisor = code.splat(largest)
        # of an infinity NaN, else the same
        largest += largest - largest
        sums = [code.variable(code.constant(I32X16, 0)) for _ in range(n_integers)]
        with code.loop(0, n_in, ROW_MULTIPLE) as at:
            rest = code.load(source + at * 4, F32X16) / divisor * float(ROW_LEVELS)
            for i, total in enumerate(sums):
                shifted = rest + ROUND
                integers = shifted.bits(I32X16) - ROUND_BITS
                total.set(total.value + integers)
                code.store(integers.resize(I8), target + n_in * i + at)
                rest = (rest - (shifted - ROUND)) * float(SECOND_ROW_STEPS)
        behind = target + n_in * n_integers
        for i, total in enumerate(sums):
            code.store(code.sum(total.value) * BYTE_ZERO, behind + 4 * i)
        code.store(largest, behind + 4 * n_integers)


def _largest(code: Code, source: Value, n_in: Value) -> Value:
    """The largest magnitude, the smallest normal number at least.

    By the bits, among which those of NaN are the largest.
    """
    most = code.variable(code.constant(I32X16, _TINY_BITS))
    with code.loop(0, n_in, ROW_MULTIPLE) as at:
        bits = code.load(source + at * 4, I32X16) & MAGNITUDE
        most.set(code.larger(bits, most.value))
    return code.maximum(most.value).bits(F32)
