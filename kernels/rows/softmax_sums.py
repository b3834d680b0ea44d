"""What a softmax of long rows is divided by, and its entropy's sum, without the softmax itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from llvmlite import ir

from kernels.dispatch import pick
from kernels.llvm import F32, F32X16, Code, Program, Value, vector
from kernels.llvm.functions import exp
from kernels.llvm.rows import LANES, rows, run, start, vectors

LEAST = -1e4
"""Numbers further below the largest count as this far below: finite, and e to the power of it is
0."""


def softmax_sums(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Of every row the sum of e^s and that of s e^s, s = max(x - largest, LEAST).

    x: f32 [n, d]; largest: f32 [n]. Returns f32 [n, 2]; NaN where the row has one. A row has the
    same bits whatever the other rows are.
    """
    return _run(x, largest)


def softmax_sums_naive(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The sums of a softmax in float64."""
    s = (x - largest.unsqueeze(1)).clamp_min(LEAST).double()
    return torch.stack((s.exp().sum(1), (s * s.exp()).sum(1)), 1).float()


def softmax_sums_with_torch(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The sums of a softmax by operations on all rows."""
    s = (x - largest.unsqueeze(1)).clamp_min_(LEAST)
    weights = s.exp()
    return torch.stack((weights.sum(1), torch.linalg.vecdot(weights, s)), 1)


# sums added up at a time: each addition waits for the one before
SUMS = 4


def softmax_sums_with_llvm(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The sums of a softmax on a CPU: each row read once, its sums added up in one order."""
    n, d = x.shape
    sums, largest = x.new_empty(n, 2), largest.contiguous()
    x, places = rows(x)
    run(_program(d), n, d, *places, largest.data_ptr(), sums.data_ptr())
    return sums


@functools.cache
def _program(d: int) -> Program:
    return Program(functools.partial(_body, d), 6)


def _body(d: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: x in RowPlaces, the largest of each row, the sums."""
    *x, largest, sums = args
    zero, least = code.constant(F32X16, 0.0), code.constant(F32X16, LEAST)
    with code.loop(first, last) as row:
        source, most = start(x, row), code.splat(code.load(largest + row * 4, F32))
        totals = [[code.variable(zero) for _ in range(SUMS)] for _ in range(2)]
        for i, (at, count) in enumerate(vectors(code, d, SUMS)):
            # b where there is a NaN: it stays
            s = code.larger(least, code.load_first(source + at, F32X16, count) - most)
            weight = exp(code, s)
            if count < LANES:
                there = [lane < count for lane in range(LANES)]
                weight = code.choose(
                    code.constants(vector(ir.IntType(1), LANES), there), weight, zero
                )
            for total, part in zip(totals, (weight, weight * s), strict=True):
                total[i % SUMS].set(total[i % SUMS].value + part)
        for i, total in enumerate(totals):
            a, b, c, e = (part.value for part in total)
            code.store(code.sum((a + b) + (c + e)), sums + row * 8 + 4 * i)


_run = pick(softmax_sums_naive, softmax_sums_with_torch, None, softmax_sums_with_llvm)
