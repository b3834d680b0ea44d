"""The weighted sums of the experts' results on a processor."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.rows import run, vectors


def combine(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over j of weights[i, j] lines[i, j], in the order of j.

    lines: f32 [n, k, d]; weights: f32 [n, k]; both contiguous. Returns f32 [n, d].
    """
    n_rows, n_used, d = lines.shape
    y = torch.empty(n_rows, d)
    run(_program(d, n_used), n_rows, d * n_used, lines.data_ptr(), weights.data_ptr(), y.data_ptr())
    return y


@functools.cache
def _program(d: int, n_used: int) -> Program:
    return Program(functools.partial(_body, d, n_used), 3)


def _body(
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
