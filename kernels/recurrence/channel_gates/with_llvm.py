"""The gates on a processor: both in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid, softplus
from kernels.llvm.rows import rows, run, start, vectors


def channel_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.channel_gates.channel_gates."""
    n_channels, n_heads = decay.shape[-1], beta.shape[-1]
    g, opened = decay.new_empty(*decay.shape), beta.new_empty(*beta.shape)
    dt, a = dt.contiguous(), a.contiguous()
    decay, decay_rows = rows(decay)
    beta, beta_rows = rows(beta)
    run(
        _program(n_channels, n_heads, bound),
        g.numel() // n_channels,
        n_channels,
        *decay_rows,
        dt.data_ptr(),
        a.data_ptr(),
        g.data_ptr(),
        *beta_rows,
        opened.data_ptr(),
    )
    return g, opened


channel_gates_invariant = channel_gates


@functools.cache
def _program(n_channels: int, n_heads: int, bound: float | None) -> Program:
    return Program(functools.partial(_body, n_channels, n_heads, bound), 12)


def _body(
    n_channels: int,
    n_heads: int,
    bound: float | None,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Arguments: decay in RowPlaces, dt, a, g, beta in RowPlaces, the opened beta."""
    dt, a, g, opened = *args[4:7], args[11]
    zero = code.constant(F32X16, 0.0)
    with code.loop(first, last) as row:
        decay, beta = start(args[:4], row), start(args[7:11], row)
        for at, count in vectors(code, n_channels):
            x, bias, scale = (code.load_first(p + at, F32X16, count) for p in (decay, dt, a))
            x += bias
            if bound is None:
                kept = softplus(code, x) * scale
            else:
                kept = sigmoid(code, zero - x * scale) * bound
            code.store_first(kept, g + row * (4 * n_channels) + at, count)
        for at, count in vectors(code, n_heads):
            written = sigmoid(code, code.load_first(beta + at, F32X16, count))
            code.store_first(written, opened + row * (4 * n_heads) + at, count)
