"""The experts' results put together on a processor: weighted sums, and the shared expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid
from kernels.llvm.rows import rows, run, start, vectors


def combine(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over j of weights[i, j] lines[i, j], in the order of j.

    lines: f32 [n, k, d]; weights: f32 [n, k]; both contiguous. Returns f32 [n, d].
    """
    n_rows, n_used, d = lines.shape
    y = torch.empty(n_rows, d)
    addresses = lines.data_ptr(), weights.data_ptr(), y.data_ptr()
    run(_combine(d, n_used), n_rows, d * n_used, *addresses)
    return y


def add_shared(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """See kernels.moe.add_shared."""
    n_rows, d = routed.shape
    y = torch.empty(n_rows, d)
    routed, routed_rows = rows(routed)
    gate, gate_rows = rows(gate)
    shared, shared_rows = rows(shared)
    run(_add(d), n_rows, d, *routed_rows, *gate_rows, *shared_rows, y.data_ptr())
    return y


@functools.cache
def _combine(d: int, n_used: int) -> Program:
    return Program(functools.partial(_combine_body, d, n_used), 3)


@functools.cache
def _add(d: int) -> Program:
    return Program(functools.partial(_add_body, d), 13)


def _combine_body(
    d: int, n_used: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    lines, weights, y = args
    with code.loop(first, last) as row:
        factors = [
            code.splat(code.load(weights + (row * n_used + j) * 4, F32)) for j in range(n_used)
        ]
        for at, count in vectors(code, d):
            total = code.constant(F32X16, 0.0)
            for j, factor in enumerate(factors):
                line = lines + (row * n_used + j) * (4 * d) + at
                total = total + factor * code.load_first(line, F32X16, count)
            code.store_first(total, y + row * (4 * d) + at, count)


def _add_body(d: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: the routed sum, the gate and the shared expert's result in RowPlaces, y."""
    y = args[12]
    with code.loop(first, last) as row:
        routed, gate, shared = (start(args[i : i + 4], row) for i in (0, 4, 8))
        opened = sigmoid(code, code.splat(code.load(gate, F32)))
        for at, count in vectors(code, d):
            part = code.load_first(shared + at, F32X16, count) * opened
            total = code.load_first(routed + at, F32X16, count) + part
            code.store_first(total, y + row * (4 * d) + at, count)
