"""Code for LLVM that multiplies some rows of integers with some panels of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernels.linear.byte_rows_with_llvm import I32X16, TAIL_BYTES
from kernels.linear.packed import INPUTS_PER_LANE, PANEL_OUTPUTS, SECOND_ROW_STEPS
from kernels.llvm import F32, F32X16, Code, Value, vector
from kernels.llvm.values import I8, I32

AHEAD = 2048
"""Bytes to the weights that are asked for: the processor's own prefetching is later."""
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

    x: rows of n_integers rows of bytes, one behind the other. panels: their addresses. at_once:
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
                    total.set(_dot(code, total.value, weight, four))
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


def _dot(code: Code, total: Value, unsigned: Value, signed: Value) -> Value:
    """total i32 [16], plus in each place four products of bytes."""
    return code.call("llvm.x86.avx512.vpdpbusd.512", I32X16, total, unsigned, signed)


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
