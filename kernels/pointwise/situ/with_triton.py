"""SiTU on a GPU: both halves read once, nothing in between written."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import as_rows, cdiv, jit

TILE = 1024


@jit
def tanh(x):
    """Near zero by a series (Cephes), which keeps the digits of small x."""
    square = x * x
    series = ((-0.00570498872745 * square + 0.0206390887954) * square - 0.0537397155531) * square
    series = (series + 0.133314422036) * square - 0.333332819422
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(square < 0.390625, x + x * square * series, tl.where(x < 0, -far, far))


@jit
def _situ(
    gate, up, y, d, gate_row, up_row, beta, linear_beta, BOUNDED: tl.constexpr, BD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    opened = tl.load(gate + row * gate_row + column, inside, 0.0)
    passed = tl.load(up + row * up_row + column, inside, 0.0)
    if BOUNDED:
        passed = tanh(passed / linear_beta) * linear_beta
    values = tanh(opened / beta) * beta * tl.sigmoid(opened)
    tl.store(y + row * d + column, values * passed, inside)


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """See kernels.pointwise.situ.situ."""
    d = gate.shape[-1]
    gates, ups, y = as_rows(gate), as_rows(up), gate.new_empty(gate.shape)
    _situ[(gates.shape[0], cdiv(d, TILE))](
        gates, ups, y, d, gates.stride(0), ups.stride(0), float(beta), float(linear_beta),
        BOUNDED=linear_beta > 0, BD=TILE, num_warps=4,
    )  # fmt: skip
    return y
