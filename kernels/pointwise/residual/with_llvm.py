"""Sums on a processor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.rows import rows, run, start, vectors


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.residual.add."""
    d, total = x.shape[-1], x.new_empty(*x.shape)
    x, x_rows = rows(x)
    y, y_rows = rows(y.expand(total.shape))
    run(_program(d), total.numel() // d, d, *x_rows, *y_rows, total.data_ptr())
    return total


@functools.cache
def _program(d: int) -> Program:
    return Program(functools.partial(_body, d), 9)


def _body(d: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: x and y in RowPlaces, the sums."""
    with code.loop(first, last) as row:
        x, y, total = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        for at, count in vectors(code, d):
            a, b = (code.load_first(side + at, F32X16, count) for side in (x, y))
            code.store_first(a + b, total + at, count)
