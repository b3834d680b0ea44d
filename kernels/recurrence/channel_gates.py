"""The gates of Kimi Delta Attention: what each key channel of a state keeps, what a head writes;
and all that a delta rule takes of a layer's projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import operation, runs_triton
from kernels.llvm import F32X16, Code, Value, kernel
from kernels.llvm.functions import run, sigmoid, softplus, start, vectors
from kernels.norm import l2_norm
from kernels.pointwise import delta_gates
from kernels.pointwise.with_torch import pointwise

RawGates = tuple[float, Tensor, Tensor, float | None]
"""eps, dt, a and bound of `normed_and_gated`."""


@operation(triton="kernels.recurrence.with_triton", llvm=__name__)
def channel_gates(
    decay: Tensor,
    dt: Tensor,
    a: Tensor,
    beta: Tensor,
    bound: float | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log decay g of every channel, and sigmoid(beta) of every head, as
    kernels.recurrence.delta_rule takes them.

    Without `bound`, g = softplus(decay + dt) * a; with it g = bound * sigmoid(-(decay + dt) * a),
    which is never below bound < 0 (arXiv 2510.26692, and the `safe gate` of later models).

    decay: f32 [..., C], beta: f32 [..., H], a layer's projections, any strides; dt, a: f32 [C], a =
    -exp(A_log) of the channel's head. Returns g [..., C] and [..., H]. Differentiable.

    invariant: each result has the same bits whatever its neighbours are.
    """
    x, written = decay + dt, pointwise(torch.sigmoid, beta, invariant=invariant)
    if bound is None:
        return pointwise(functional.softplus, x, invariant=invariant) * a, written
    return pointwise(torch.sigmoid, x * -a, invariant=invariant) * bound, written


def channel_gates_naive(
    decay: Tensor, dt: Tensor, a: Tensor, beta: Tensor, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The gates as their formulas read."""
    x, written = decay + dt, 1 / (1 + torch.exp(-beta))
    if bound is not None:
        return bound / (1 + torch.exp(x * a)), written
    # log(1 + e^x), without an e^x that overflows
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))) * a, written


def channel_gates_with_llvm(
    decay: Tensor, dt: Tensor, a: Tensor, beta: Tensor, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The gates on a CPU: both in one pass."""
    n_channels, n_heads = decay.shape[-1], beta.shape[-1]
    g, opened = decay.new_empty(*decay.shape), beta.new_empty(*beta.shape)
    program, n_rows = _program(n_channels, n_heads, bound), g.numel() // n_channels
    run(program, n_rows, n_channels, (decay,), dt, a, g, (beta,), opened)
    return g, opened


@kernel(12)
def _program(
    code: Code,
    args: Sequence[Value],
    row: Value,
    n_channels: int,
    n_heads: int,
    bound: float | None,
) -> None:
    """Arguments: decay in RowPlaces, dt, a, g, beta in RowPlaces, the opened beta."""
    dt, a, g, opened = *args[4:7], args[11]
    zero = code.constant(F32X16, 0.0)
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


def normed_and_gated(
    qk: Tensor,
    eps: float,
    decay: Tensor,
    dt: Tensor,
    a: Tensor,
    beta: Tensor,
    bound: float | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """l2_norm(qk, eps), and kernels.pointwise.delta_gates of heads, decay [B, T, H], or
    kernels.recurrence.channel_gates of channels, decay [B, T, C], bounded or not.

    qk: f32 [B, T, H_qk, d], queries and keys. Returns qk, g of the shape of decay, and beta
    [B, T, H].
    """
    if runs_triton(qk):
        from kernels.recurrence import with_triton

        return with_triton.normed_and_gated(qk, eps, decay, dt, a, beta, bound)
    qk = l2_norm(qk, eps)
    if decay.shape == beta.shape and bound is None:
        return qk, *delta_gates(decay, dt, a, beta, invariant=invariant)
    return qk, *channel_gates(decay, dt, a, beta, bound, invariant=invariant)
