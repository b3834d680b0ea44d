"""SwiGLU on a processor: both halves read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import silu
from kernels.llvm.rows import rows, run, start, vectors


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See kernels.swiglu.swiglu."""
    d, y = gate.shape[-1], gate.new_empty(*gate.shape)
    gate, gate_rows = rows(gate)
    up, up_rows = rows(up)
    run(_program(d), y.numel() // d, d, *gate_rows, *up_rows, y.data_ptr())
    return y


swiglu_invariant = swiglu


@functools.cache
def _program(d: int) -> Program:
    return Program(functools.partial(_body, d), 9)


def _body(d: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: gate and up in RowPlaces, y."""
    with code.loop(first, last) as row:
        gate, up, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        for at, count in vectors(code, d):
            value = silu(code, code.load_first(gate + at, F32X16, count))
            value *= code.load_first(up + at, F32X16, count)
            code.store_first(value, y + at, count)
