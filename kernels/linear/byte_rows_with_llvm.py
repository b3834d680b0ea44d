"""Rows of x rounded to signed bytes, each followed by its scale and sums (TAIL_BYTES)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.linear.packed import BYTE_ZERO, ROW_LEVELS, ROW_MULTIPLE, SECOND_ROW_STEPS
from kernels.llvm import F32, F32X16, Code, Program, Value, vector
from kernels.llvm.rows import RowPlaces, rows, run, start
from kernels.llvm.values import I8, I32

I32X16 = vector(I32, 16)

TAIL_BYTES = 64
"""Bytes behind the integers: BYTE_ZERO times the sum of each row of them, i32, then the largest
magnitude of the row of x, f32. So many, that rows do not all fall into the same few lines of the
cache."""

# added to a number of up to 127, it leaves the nearest integer in the last bits of the sum
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
_MAGNITUDE = 0x7FFFFFFF
_TINY_BITS = 0x00800000


def row_bytes(n_in: int, n_integers: int) -> int:
    """Bytes of a rounded row of n_in numbers. n_integers: rows of integers made of it, 1 or 2."""
    return (n_in + -n_in % ROW_MULTIPLE) * n_integers + TAIL_BYTES


def whole_rows(x: torch.Tensor) -> tuple[torch.Tensor, RowPlaces]:
    """x f32 [..., in], its rows filled up to a multiple of ROW_MULTIPLE, and where they are."""
    filling = -x.shape[-1] % ROW_MULTIPLE
    return rows(functional.pad(x, (0, filling)) if filling else x)


def quantise(x: torch.Tensor, n_integers: int) -> torch.Tensor:
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
                shifted = rest + _ROUND
                integers = shifted.bits(I32X16) - _ROUND_BITS
                total.set(total.value + integers)
                code.store(integers.resize(I8), target + n_in * i + at)
                rest = (rest - (shifted - _ROUND)) * float(SECOND_ROW_STEPS)
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
        bits = code.load(source + at * 4, I32X16) & _MAGNITUDE
        most.set(code.larger(bits, most.value))
    return code.maximum(most.value).bits(F32)
