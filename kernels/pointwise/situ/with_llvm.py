"""SiTU on a processor: both halves read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid, tanh
from kernels.llvm.rows import rows, run, start, vectors


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """See kernels.pointwise.situ.situ."""
    d, y = gate.shape[-1], gate.new_empty(*gate.shape)
    gate, gate_rows = rows(gate)
    up, up_rows = rows(up)
    program = _program(d, beta, linear_beta)
    run(program, y.numel() // d, d, *gate_rows, *up_rows, y.data_ptr())
    return y


situ_invariant = situ


@functools.cache
def _program(d: int, beta: float, linear_beta: float) -> Program:
    return Program(functools.partial(_body, d, beta, linear_beta), 9)


def _body(
    d: int,
    beta: float,
    linear_beta: float,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Arguments: gate and up in RowPlaces, y."""
    with code.loop(first, last) as row:
        gate, up, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        for at, count in vectors(code, d):
            opened = code.load_first(gate + at, F32X16, count)
            value = tanh(code, opened / beta) * beta * sigmoid(code, opened)
            passed = code.load_first(up + at, F32X16, count)
            if linear_beta > 0:
                passed = tanh(code, passed / linear_beta) * linear_beta
            code.store_first(value * passed, y + at, count)
