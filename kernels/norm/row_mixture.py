"""Softmax-weighted sums of rows: the residual attention across layers of kimi-k3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import exp, run, start, vectors
from kernels.norm import rms_norm
from kernels.pointwise.with_torch import pointwise

MOST_ROWS = 1024
"""Other rows that a row is mixed with, at most."""


@operation(llvm=__name__)
def mix_rows(
    x: Tensor, others: Tensor, weight: Tensor, eps: float, *, invariant: bool = False
) -> Tensor:
    """The rows of x and of `others`, weighted by the softmax of their scores; a
    score is the sum of weight * row / sqrt(mean(row^2) + eps).

    x: f32 [..., d]; others: f32 [n, ..., d], contiguous, n from 1 to MOST_ROWS; weight: f32 [d].
    Returns [..., d]. Differentiable.

    invariant: a row of the result has the same bits whatever the other tokens are.
    """
    rows = torch.cat((others, x[None]))
    scores = rms_norm(rows, weight, eps).sum(-1, keepdim=True)
    weights = pointwise(torch.exp, scores - scores.amax(0), invariant=invariant)
    return (weights / weights.sum(0) * rows).sum(0)


def mix_rows_naive(x: Tensor, others: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The sums as their formula reads. Keeps the dtype of its inputs."""
    rows = torch.cat((others, x[None]))
    scores = (weight * rows / ((rows**2).mean(-1, keepdim=True) + eps) ** 0.5).sum(-1)
    return (scores.softmax(0)[..., None] * rows).sum(0)


def mix_rows_with_llvm(x: Tensor, others: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The sums on a CPU: the rows of one token are read twice, for their scores and to be added.

    Raises ValueError for more than MOST_ROWS other rows.
    """
    d, n, y = x.shape[-1], others.shape[0], x.new_empty(*x.shape)
    if n > MOST_ROWS:
        raise ValueError(f"{n} rows are more than {MOST_ROWS}")
    apart = 4 * y.numel()
    run(_program(d, eps), y.numel() // d, d * (n + 1), (x,), others, apart, n, weight, y)
    return y


@kernel(9)
def _program(code: Code, args: Sequence[Value], row: Value, d: int, eps: float) -> None:
    """Arguments: x in RowPlaces, the others, bytes from one of them to the next, their number, the
    weight, y."""
    others, apart, n, weight, target = args[4:]
    shares = code.stack(4 * (MOST_ROWS + 1))
    zero = code.constant(F32X16, 0.0)

    def score(row: Value) -> Value:
        squares, products = code.variable(zero), code.variable(zero)
        for at, count in vectors(code, d):
            part = code.load_first(row + at, F32X16, count)
            factor = code.load_first(weight + at, F32X16, count)
            squares.set(code.fma(part, part, squares.value))
            products.set(code.fma(part, factor, products.value))
        return code.sum(products.value) / code.sqrt(code.sum(squares.value) / float(d) + eps)

    own, here = start(args[:4], row), others + row * (4 * d)
    of_own = score(own)
    most = code.variable(of_own)
    with code.loop(0, n) as i:
        found = score(here + i * apart)
        code.store(found, shares + i * 4)
        most.set(code.larger(found, most.value))
    share = exp(code, of_own - most.value)
    total = code.variable(share)
    with code.loop(0, n) as i:
        e = exp(code, code.load(shares + i * 4, F32) - most.value)
        code.store(e, shares + i * 4)
        total.set(total.value + e)
    whole, own_share = code.splat(total.value), code.splat(share)
    for at, count in vectors(code, d):
        mixed = code.variable(code.load_first(own + at, F32X16, count) * own_share)
        with code.loop(0, n) as i:
            part = code.load_first(here + i * apart + at, F32X16, count)
            factor = code.splat(code.load(shares + i * 4, F32))
            mixed.set(code.fma(part, factor, mixed.value))
        code.store_first(mixed.value / whole, target + row * (4 * d) + at, count)
