"""The norms on a GPU: each row read once."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

# numbers in one program: short rows share one
TILE = 1024


@jit(do_not_specialize_on_alignment=["n_rows"])
def _norm(
    x, gate, weight, y, n_rows, n_groups, d, x_row, gate_row, eps,
    MEAN: tl.constexpr, WEIGHT: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    column = tl.arange(0, BD)[None, :]
    inside = (row < n_rows) & (column < d)
    values = tl.load(x + row * x_row + column, inside, 0.0)
    if GATE:
        opened = tl.load(gate + row * gate_row + column, inside, 0.0)
        opened = tl.sigmoid(opened) if SIGMOID else opened * tl.sigmoid(opened)
        if GATE_FIRST:
            values *= opened
    square = tl.sum(values * values, 1, keep_dims=True)
    if MEAN:
        square = square / d
    values = values / tl.sqrt(square + eps)
    if WEIGHT:
        values *= tl.load(weight + row % n_groups * d + column, inside, 0.0)
    if GATE and not GATE_FIRST:
        values *= opened
    tl.store(y + row * d + column, values, inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.rms_norm."""
    return _run(x, eps, weight=weight)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.l2_norm."""
    return _run(x, eps)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See kernels.norm.head_norm."""
    return l2_norm(x, eps) * weight


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, sigmoid: bool = False
) -> torch.Tensor:
    """See kernels.norm.gated_rms_norm."""
    return _run(x, eps, weight=weight, gate=gate, sigmoid=sigmoid)


def group_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See kernels.norm.group_rms_norm."""
    return _run(x, eps, weight=weight, gate=gate, n_groups=weight.shape[0])


def _run(
    x: torch.Tensor,
    eps: float,
    *,
    weight: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    n_groups: int | None = None,
    sigmoid: bool = False,
) -> torch.Tensor:
    d = x.shape[-1]
    rows = as_rows(x)
    gates = rows if gate is None else as_rows(gate)
    y = x.new_empty(x.shape)
    width = power_of_2(d)
    together = max(1, TILE // width)
    _norm[(cdiv(rows.shape[0], together),)](
        rows, gates, rows if weight is None else weight.contiguous(), y,
        rows.shape[0], n_groups or 1, d, rows.stride(0), gates.stride(0), eps,
        MEAN=weight is not None, WEIGHT=weight is not None, GATE=gate is not None,
        GATE_FIRST=n_groups is not None, SIGMOID=sigmoid,
        BR=together, BD=width, num_warps=4 if width <= TILE else 8,
    )  # fmt: skip
    return y
