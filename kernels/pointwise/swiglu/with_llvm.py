"""SwiGLU on a processor: both halves read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import silu
from kernels.llvm.rows import rows, run, start, vectors


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See kernels.pointwise.swiglu.swiglu."""
    d, y = gate.shape[-1], gate.new_empty(*gate.shape)
    gate, gate_rows = rows(gate)
    up, up_rows = rows(up)
    run(_program(d, limit), y.numel() // d, d, *gate_rows, *up_rows, y.data_ptr())
    return y


swiglu_invariant = swiglu


@functools.cache
def _program(d: int, limit: float | None) -> Program:
    return Program(functools.partial(_body, d, limit), 9)


def _body(
    d: int, limit: float | None, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: gate and up in RowPlaces, y."""
    with code.loop(first, last) as row:
        gate, up, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        for at, count in vectors(code, d):
            value = silu(code, code.load_first(gate + at, F32X16, count))
            other = code.load_first(up + at, F32X16, count)
            if limit is not None:
                most, least = (code.constant(F32X16, n) for n in (limit, -limit))
                # in this order NaN stays NaN
                value, other = code.smaller(most, value), code.smaller(most, other)
                other = code.larger(least, other)
            code.store_first(value * other, y + at, count)
