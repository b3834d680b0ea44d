"""The short convolution inside a drafted block, whose weights depend on the row (DFlash2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import run, vectors


@operation(llvm=__name__)
def block_conv(x: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """y[a] = sum over taps t of (base[t] + own[a, t]) * x[a - t]; rows before the first are zero.

    x: f32 [B, T, d]; base: f32 [K, d]; own: f32 [B, T, K, G], G a divisor of d: each number counts
    for d / G neighbouring channels. Any strides. Returns f32 [B, T, d]; a row's bits depend on
    itself and the K - 1 rows before it alone.
    """
    group = x.shape[2] // own.shape[3]
    y = torch.zeros_like(x)
    for tap in range(min(len(base), x.shape[1])):
        weight = base[tap] + own[:, tap:, tap].repeat_interleave(group, -1)
        y[:, tap:] += weight * x[:, : x.shape[1] - tap]
    return y


def block_conv_naive(x: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The convolution channel by channel, from its definition."""
    n_batch, n_tokens, d = x.shape
    n_taps, group = len(base), d // own.shape[3]
    y = torch.zeros_like(x)
    for b in range(n_batch):
        for a in range(n_tokens):
            for tap in range(min(n_taps, a + 1)):
                for j in range(d):
                    weight = base[tap, j] + own[b, a, tap, j // group]
                    y[b, a, j] += weight * x[b, a - tap, j]
    return y


def block_conv_with_llvm(x: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The convolution on a CPU: every row from its taps, group by group."""
    (n_batch, n_tokens, d), (n_taps, n_groups) = x.shape, own.shape[2:]
    y = x.new_empty(n_batch, n_tokens, d)
    x, own = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, own))
    base = base.contiguous()
    run(
        _program(d, d // n_groups, n_taps),
        n_batch * n_tokens,
        d * n_taps,
        n_tokens,
        x.data_ptr(),
        4 * x.stride(0),
        4 * x.stride(1),
        base.data_ptr(),
        own.data_ptr(),
        4 * own.stride(0),
        4 * own.stride(1),
        4 * own.stride(2),
        y.data_ptr(),
    )
    return y


@functools.cache
def _program(d: int, group: int, n_taps: int) -> Program:
    return Program(functools.partial(_body, d, group, n_taps), 10)


def _body(
    d: int, group: int, n_taps: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: tokens, x and its strides, base, own and its strides, y. Strides in bytes."""
    n_tokens, x, x_b, x_t, base, own, own_b, own_t, own_k, y = args
    with code.loop(first, last) as row, code.loop(0, code.integer(d // group)) as g:
        b, a = row // n_tokens, row % n_tokens
        for at, count in vectors(code, group):
            place = g * (4 * group) + at
            total = code.variable(code.constant(F32X16, 0.0))
            for tap in range(n_taps):
                with code.when(code.integer(tap - 1).less(a)):
                    mine = code.load(own + b * own_b + a * own_t + own_k * tap + g * 4, F32)
                    weight = code.load_first(base + 4 * d * tap + place, F32X16, count)
                    values = code.load_first(x + b * x_b + (a - tap) * x_t + place, F32X16, count)
                    total.set(code.fma(weight + code.splat(mine), values, total.value))
            code.store_first(total.value, y + row * (4 * d) + place, count)
