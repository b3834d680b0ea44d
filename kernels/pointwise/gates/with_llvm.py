"""The gates on a processor: both in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid, softplus
from kernels.llvm.rows import rows, run, start, vectors


def delta_gates(
    decay: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.delta_gates."""
    n_heads = decay.shape[-1]
    g, opened = decay.new_empty(*decay.shape), beta.new_empty(*beta.shape)
    dt, a = dt.contiguous(), a.contiguous()
    decay, decay_rows = rows(decay)
    beta, beta_rows = rows(beta)
    run(
        _program(n_heads),
        g.numel() // n_heads,
        n_heads,
        *decay_rows,
        dt.data_ptr(),
        a.data_ptr(),
        g.data_ptr(),
        *beta_rows,
        opened.data_ptr(),
    )
    return g, opened


delta_gates_invariant = delta_gates


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.gates.output_gate."""
    d, y = x.shape[-1], x.new_empty(*x.shape)
    single = gate.shape[-1] == 1 < d
    x, x_rows = rows(x)
    gate, gate_rows = rows(gate)
    run(_output_program(d, single), y.numel() // d, d, *x_rows, *gate_rows, y.data_ptr())
    return y


output_gate_invariant = output_gate


@functools.cache
def _program(n_heads: int) -> Program:
    return Program(functools.partial(_body, n_heads), 12)


def _body(n_heads: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: decay in RowPlaces, dt, a, g, beta in RowPlaces, the opened beta."""
    dt, a, g, opened = *args[4:7], args[11]
    with code.loop(first, last) as row:
        decay, beta = start(args[:4], row), start(args[7:11], row)
        target = row * (4 * n_heads)
        for at, count in vectors(code, n_heads):
            x, bias, scale = (code.load_first(p + at, F32X16, count) for p in (decay, dt, a))
            code.store_first(softplus(code, x + bias) * scale, g + target + at, count)
            written = sigmoid(code, code.load_first(beta + at, F32X16, count))
            code.store_first(written, opened + target + at, count)


def step_gates(
    step: torch.Tensor, dt: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.step_gates."""
    n_heads = step.shape[-1]
    size, g = step.new_empty(*step.shape), step.new_empty(*step.shape)
    dt, a = dt.contiguous(), a.contiguous()
    step, step_rows = rows(step)
    places = dt.data_ptr(), a.data_ptr(), size.data_ptr(), g.data_ptr()
    run(_step_program(n_heads), g.numel() // n_heads, n_heads, *step_rows, *places)
    return size, g


step_gates_invariant = step_gates


@functools.cache
def _step_program(n_heads: int) -> Program:
    return Program(functools.partial(_step_body, n_heads), 8)


def _step_body(n_heads: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: the steps in RowPlaces, dt, a, the sizes, g."""
    dt, a, sizes, g = args[4:]
    with code.loop(first, last) as row:
        step, target = start(args[:4], row), row * (4 * n_heads)
        for at, count in vectors(code, n_heads):
            x, bias, scale = (code.load_first(p + at, F32X16, count) for p in (step, dt, a))
            size = softplus(code, x + bias)
            code.store_first(size, sizes + target + at, count)
            code.store_first(size * scale, g + target + at, count)


@functools.cache
def _output_program(d: int, single: bool) -> Program:
    return Program(functools.partial(_output_body, d, single), 9)


def _output_body(
    d: int, single: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: x and gate in RowPlaces, y. single: one gate for a row."""
    with code.loop(first, last) as row:
        x, gate, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        opened = sigmoid(code, code.splat(code.load(gate, F32))) if single else None
        for at, count in vectors(code, d):
            factor = opened or sigmoid(code, code.load_first(gate + at, F32X16, count))
            code.store_first(code.load_first(x + at, F32X16, count) * factor, y + at, count)
