"""The norms on a GPU: each row read once, and rounded for the products that read it next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton.language as tl
from torch import Tensor

from kernels.linear.block_linear.with_triton import FEW_ROWS
from kernels.linear.block_parts import LONG, IntegerRows, PreparedRows, Rows
from kernels.linear.integer_blocks.rows_with_triton import (
    empty_integers,
    integer_rows,
    kinds_of,
    norm_row,
    parts_of,
    store_row,
)
from kernels.linear.packed import PackedWeight
from kernels.norm import GatedArguments
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

# numbers in one program: short rows share one
TILE = 1024


@jit(do_not_specialize_on_alignment=["n_rows"])
def _norm(
    x, gate, weight, y, kept, n_rows, n_heads, n_weights, d, x_t, x_h, gate_t, gate_h, eps,
    MEAN: tl.constexpr, WEIGHT: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, KEPT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BR rows, heads of tokens one after the other. With KEPT they are of one token."""
    first = tl.program_id(0).to(tl.int64) * BR
    row = (first + tl.arange(0, BR))[:, None]
    token, head = row // n_heads, row % n_heads
    column = tl.arange(0, BD)[None, :]
    inside = (row < n_rows) & (column < d)
    values = tl.load(x + token * x_t + head * x_h + column, inside, 0.0)
    if GATE:
        opened = tl.load(gate + token * gate_t + head * gate_h + column, inside, 0.0)
        opened = tl.sigmoid(opened) if SIGMOID else opened * tl.sigmoid(opened)
        if GATE_FIRST:
            values *= opened
    square = tl.sum(values * values, 1, keep_dims=True)
    if MEAN:
        square = square / d
    values = values / tl.sqrt(square + eps)
    if WEIGHT:
        values *= tl.load(weight + row % n_weights * d + column, inside, 0.0)
    if GATE and not GATE_FIRST:
        values *= opened
    tl.store(y + row * d + column, values, inside)
    if len(KEPT) > 0:
        store_row(
            values, kept, first // n_heads, first % n_heads * d, n_heads * d, True, KEPT, BR * BD
        )


@jit
def _norm_rows(x, x_row, weight, y, kept, d, eps, KEPT: tl.constexpr, N: tl.constexpr):
    norm_row(x, x_row, weight, y, kept, tl.program_id(0).to(tl.int64), d, eps, KEPT, N)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run_rows(x, weight, eps, ())[0]


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float, reads: Iterable[PackedWeight]) -> Rows:
    """See kernels.norm.rms_norm with `reads`."""
    y, integers = _run_rows(x, weight, eps, reads)
    return PreparedRows(y, integers) if integers else y


def _run_rows(
    x: Tensor, weight: Tensor, eps: float, reads: Iterable[PackedWeight]
) -> tuple[Tensor, dict[int, IntegerRows]]:
    rows, y = as_rows(x), x.new_empty(x.shape)
    n, d = rows.shape
    parts = parts_of(reads) if n <= FEW_ROWS else ()
    integers = empty_integers(n, d, parts, x.device)
    _norm_rows[(n,)](
        rows, rows.stride(0), weight.contiguous(), y, tuple(map(tuple, integers.values())), d, eps,
        KEPT=kinds_of(parts), N=min(max(power_of_2(d), LONG), TILE), num_warps=4,
    )  # fmt: skip
    return y, integers


def l2_norm(x: Tensor, eps: float) -> Tensor:
    return _run(_heads(x), eps)[0].view(x.shape)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run(_heads(x), eps, weight=weight, mean=False)[0].view(x.shape)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False
) -> Tensor:
    y, _ = _run(_heads(x), eps, weight=weight, gate=_heads(gate), sigmoid=sigmoid)
    return y.view(x.shape)


def gated_rms_norm_rows(*inputs: *GatedArguments, **how: Any) -> Rows:
    """See kernels.norm.gated_rms_norm_rows; how: sigmoid and reads."""
    x, gate, weight, eps = inputs
    return _rows(x, eps, weight=weight, gate=_heads(gate), **how)


def group_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y, _ = _run(_heads(x), eps, weight=weight, gate=_heads(gate), gate_first=True)
    return y.view(x.shape)


def group_rms_norm_rows(*inputs: *GatedArguments, reads: Iterable[PackedWeight]) -> Rows:
    x, gate, weight, eps = inputs
    return _rows(x, eps, weight=weight, gate=_heads(gate), gate_first=True, reads=reads)


def _rows(x: Tensor, eps: float, **how: Any) -> Rows:
    """`_run` of heads [..., H, d], as rows [..., H * d]."""
    y, integers = _run(_heads(x), eps, **how)
    flat = y.view(*x.shape[:-2], -1)
    return PreparedRows(flat, integers) if integers else flat


def _heads(x: Tensor) -> Tensor:
    """[n, H, d] with neighbours side by side, a view where the strides allow it."""
    heads = (x.unsqueeze(0) if x.dim() == 2 else x).flatten(0, -3)
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _run(
    x: Tensor,
    eps: float,
    *,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    sigmoid: bool = False,
    mean: bool = True,
    reads: Iterable[PackedWeight] = (),
) -> tuple[Tensor, dict[int, IntegerRows]]:
    """x, gate: [n, H, d]. The norms, and the n rows of all heads as integers for `reads`: on the
    way where heads fill whole blocks of a program, else of the result."""
    n, n_heads, d = x.shape
    gates = x if gate is None else gate
    y = x.new_empty(x.shape)
    width = power_of_2(d)
    together = max(1, TILE // width)
    parts = parts_of(reads) if n <= FEW_ROWS else ()
    sides = [side for side, _ in kinds_of(parts)]
    whole = n_heads == 1 and all(d % side == 0 for side in sides)
    if whole and parts:
        together, width = 1, max(width, *sides)
    elif parts and width == d:
        together = max(*sides, d, 1) // d
        while together < TILE // d and n_heads % (2 * together) == 0:
            together *= 2
        whole = n_heads % together == 0 and all(together * d % side == 0 for side in sides)
    integers = empty_integers(n, n_heads * d, parts, x.device) if whole else {}
    _norm[(cdiv(n * n_heads, together),)](
        x, gates, x if weight is None else weight.contiguous(), y,
        tuple(map(tuple, integers.values())),
        n * n_heads, n_heads, 1 if weight is None else weight.numel() // d, d,
        x.stride(0), x.stride(1), gates.stride(0), gates.stride(1), eps,
        MEAN=mean and weight is not None, WEIGHT=weight is not None, GATE=gate is not None,
        GATE_FIRST=gate_first, SIGMOID=sigmoid, KEPT=kinds_of(parts) if whole else (),
        BR=together, BD=width, num_warps=4 if width <= TILE else 8,
    )  # fmt: skip
    if parts and not whole:
        integers = integer_rows(y.view(n, -1), parts)
    return y, integers
