"""The norms of the model family; all divide by a root mean square or a length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import operation, runs_triton, torch_version
from kernels.linear.block_parts import Rows
from kernels.linear.packed import PackedWeight
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.code import Variable
from kernels.llvm.functions import run, sigmoid, silu, start, vectors
from kernels.pointwise.with_torch import pointwise

_TRITON = "kernels.norm.with_triton"

GatedArguments = tuple[Tensor, Tensor, Tensor, float]
"""x, gate, weight and eps, as gated_rms_norm and group_rms_norm describe them."""


@operation(triton=_TRITON, llvm=__name__)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv 1910.07467).

    x: f32 [..., d]; weight: f32 [d], used as it is, never 1 + weight. Returns [..., d].
    Differentiable, as are the other two.
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


@operation(triton=_TRITON)
def rms_norm_rows(x: Tensor, weight: Tensor, eps: float, reads: Sequence[PackedWeight]) -> Rows:
    """rms_norm of rows that are multiplied with these matrices. On a GPU the same launch rounds few
    rows to what the products need; likewise in the functions below that have `reads`."""
    return rms_norm(x, weight, eps)


@operation(llvm=__name__)
def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last axis (arXiv 1607.06450), no bias.

    x: f32 [..., d]; weight: f32 [d]. Returns [..., d]. Differentiable.
    """
    return functional.layer_norm(x, (x.shape[-1],), weight, None, eps)


@operation(triton=_TRITON, llvm=__name__)
def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis; a row of zeros stays zero for eps > 0.

    x: f32 [..., d]. Returns [..., d].
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@operation(triton=_TRITON, llvm=__name__)
def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """l2_norm(x, eps) * weight, with a weight of its own for every head.

    x: f32 [..., H, d]; weight: f32 [H, d]. Returns [..., H, d].
    """
    return torch_version(l2_norm)(x, eps) * weight


@operation(triton=_TRITON, llvm=__name__)
def gated_rms_norm(
    *inputs: *GatedArguments, sigmoid: bool = False, invariant: bool = False
) -> Tensor:
    """rms_norm(x) * silu(gate): norm first, gate second, as a Gated DeltaNet layer ends.

    inputs: x, gate, weight, eps. x, gate: f32 [..., d]; weight: f32 [d]. Returns [..., d]. sigmoid:
    times sigmoid(gate) instead, as Kimi Delta Attention ends.
    invariant: a row has the same bits whatever the other rows are, as in the other two anyway.
    """
    x, gate, weight, eps = inputs
    activate = torch.sigmoid if sigmoid else functional.silu
    return torch_version(rms_norm)(x, weight, eps) * pointwise(activate, gate, invariant=invariant)


def gated_rms_norm_rows(
    *inputs: *GatedArguments,
    reads: Sequence[PackedWeight],
    sigmoid: bool = False,
    invariant: bool = False,
) -> Rows:
    """gated_rms_norm of heads, [..., H, d], as rows [..., H * d]; reads: as in rms_norm_rows."""
    if runs_triton(inputs[0]):
        from kernels.norm.with_triton import gated_rms_norm_rows as run

        return run(*inputs, sigmoid=sigmoid, reads=reads)
    return gated_rms_norm(*inputs, sigmoid=sigmoid, invariant=invariant).flatten(-2)


@operation(triton=_TRITON, llvm=__name__)
def group_rms_norm(*inputs: *GatedArguments, invariant: bool = False) -> Tensor:
    """rms_norm(x * silu(gate)) of every group by itself: gate first, norm second, as a Mamba-2
    layer ends.

    inputs: x, gate, weight, eps. x, gate: f32 [..., G, d]; weight: f32 [G, d]. Returns [..., G, d].
    Differentiable. invariant: as in gated_rms_norm.
    """
    x, gate, weight, eps = inputs
    opened = x * pointwise(functional.silu, gate, invariant=invariant)
    return functional.rms_norm(opened, (x.shape[-1],), None, eps) * weight


def group_rms_norm_rows(
    *inputs: *GatedArguments, reads: Sequence[PackedWeight], invariant: bool = False
) -> Rows:
    """group_rms_norm as rows [..., G * d]; reads: as in rms_norm_rows."""
    if runs_triton(inputs[0]):
        from kernels.norm.with_triton import group_rms_norm_rows as run

        return run(*inputs, reads=reads)
    return group_rms_norm(*inputs, invariant=invariant).flatten(-2)


# The norms as their formulas read.


def rms_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean_square + eps) * weight


def layer_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return rms_norm_naive(centred, weight, eps)


def l2_norm_naive(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def head_norm_naive(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return l2_norm_naive(x, eps) * weight


def gated_rms_norm_naive(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False
) -> Tensor:
    opened = torch.sigmoid(gate)
    return rms_norm_naive(x, weight, eps) * (opened if sigmoid else gate * opened)


def group_rms_norm_naive(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_naive(x * (gate * torch.sigmoid(gate)), weight, eps)


# The norms on a CPU: each row in one go, its squares added up in one order.
# sums added up at a time: each addition waits for the one before
SUMS = 4


def rms_norm_with_llvm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, eps, weight, mean=True)


def head_norm_with_llvm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, eps, weight, mean=False)


def layer_norm_with_llvm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d, y = x.shape[-1], x.new_empty(*x.shape)
    run(_layer_program(d, eps), y.numel() // d, d, (x,), y, weight)
    return y


def l2_norm_with_llvm(x: Tensor, eps: float) -> Tensor:
    return _norm(x, eps)


def gated_rms_norm_with_llvm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False
) -> Tensor:
    gating = "sigmoid" if sigmoid else "silu"
    return _norm(x, eps, weight, mean=True, gate=gate, gating=gating)


def group_rms_norm_with_llvm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, eps, weight, mean=True, gate=gate, gating="first")


def _norm(
    x: Tensor,
    eps: float,
    weight: Tensor | None = None,
    *,
    mean: bool = False,
    gate: Tensor | None = None,
    gating: str = "",
) -> Tensor:
    d, y = x.shape[-1], x.new_empty(*x.shape)
    n = 0 if weight is None else weight.numel() // d
    gates = x if gate is None else gate
    run(_program(d, eps, mean, n, gating), y.numel() // d, d, (x,), y, weight, (gates,))
    return y


@kernel(10)
def _program(
    code: Code,
    args: Sequence[Value],
    row: Value,
    d: int,
    eps: float,
    mean: bool,
    n_weights: int,
    gating: str,
) -> None:
    """Arguments: x in RowPlaces, y, the weights if any, a gate in RowPlaces if any.

    mean: of the squares, else their sum. n_weights: rows of weights, which the rows take in turn.
    gating: "" for none, what opens it, or "first" for silu before the norm.
    """
    x, y, weights, gates = args[:4], args[4], args[5], args[6:]
    source, gate, target = start(x, row), start(gates, row), y + row * (4 * d)
    is_first, opened = gating == "first", sigmoid if gating == "sigmoid" else silu
    sums = [code.variable(code.constant(F32X16, 0.0)) for _ in range(SUMS)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        part, total = code.load_first(source + at, F32X16, count), sums[i % SUMS]
        if is_first:
            part *= silu(code, code.load_first(gate + at, F32X16, count))
            code.store_first(part, target + at, count)
        total.set(code.fma(part, part, total.value))
    square = _added(code, sums)
    if mean:
        square = square / float(d)
    scale = code.splat(code.constant(F32, 1.0) / code.sqrt(square + eps))
    weight = weights + row % n_weights * (4 * d) if n_weights > 1 else weights
    for at, count in vectors(code, d):
        result = code.load_first((target if is_first else source) + at, F32X16, count) * scale
        if n_weights:
            result *= code.load_first(weight + at, F32X16, count)
        if gating and not is_first:
            result *= opened(code, code.load_first(gate + at, F32X16, count))
        code.store_first(result, target + at, count)


def _added(code: Code, sums: Sequence[Variable]) -> Value:
    a, b, c, e = (total.value for total in sums)
    return code.sum((a + b) + (c + e))


@kernel(6)
def _layer_program(code: Code, args: Sequence[Value], row: Value, d: int, eps: float) -> None:
    """Arguments: x in RowPlaces, y, the weight."""
    x, y, weight = args[:4], args[4], args[5]
    zero = code.constant(F32X16, 0.0)
    source, target = start(x, row), y + row * (4 * d)
    sums = [code.variable(zero) for _ in range(SUMS)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        total = sums[i % SUMS]
        total.set(total.value + code.load_first(source + at, F32X16, count))
    mean = code.splat(_added(code, sums) / float(d))
    squares = [code.variable(zero) for _ in range(SUMS)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        part, total = code.load_first(source + at, F32X16, count) - mean, squares[i % SUMS]
        code.store_first(part, target + at, count)
        # numbers beyond the row are zero again
        part = code.load_first(target + at, F32X16, count)
        total.set(code.fma(part, part, total.value))
    square = _added(code, squares) / float(d)
    scale = code.splat(code.constant(F32, 1.0) / code.sqrt(square + eps))
    for at, count in vectors(code, d):
        result = code.load_first(target + at, F32X16, count) * scale
        result *= code.load_first(weight + at, F32X16, count)
        code.store_first(result, target + at, count)
