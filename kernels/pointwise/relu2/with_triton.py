"""Squared ReLU on a GPU."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import as_rows, cdiv, jit

TILE = 1024


@jit
def _relu2(x, y, d, x_row, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    values = tl.load(x + row * x_row + column, inside, 0.0)
    # the comparison leaves NaN as it is
    values = tl.where(values < 0.0, 0.0, values)
    tl.store(y + row * d + column, values * values, inside)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.relu2.relu2."""
    d, rows, y = x.shape[-1], as_rows(x), x.new_empty(x.shape)
    _relu2[(rows.shape[0], cdiv(d, TILE))](rows, y, d, rows.stride(0), BD=TILE, num_warps=4)
    return y
