"""SwiGLU on a GPU: both halves read once, nothing in between written."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.triton_setup import as_rows, cdiv, jit

TILE = 1024


@jit
def _swiglu(gate, up, y, d, gate_row, up_row, limit, LIMITED: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    opened = tl.load(gate + row * gate_row + column, inside, 0.0)
    values = opened * tl.sigmoid(opened)
    others = tl.load(up + row * up_row + column, inside, 0.0)
    if LIMITED:
        values = tl.where(values > limit, limit, values)
        others = tl.where(others > limit, limit, tl.where(others < -limit, -limit, others))
    tl.store(y + row * d + column, values * others, inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See kernels.pointwise.swiglu.swiglu."""
    d = gate.shape[-1]
    gates, ups = as_rows(gate), as_rows(up)
    y = gate.new_empty(gate.shape)
    _swiglu[(gates.shape[0], cdiv(d, TILE))](
        gates, ups, y, d, gates.stride(0), ups.stride(0), limit or 0.0,
        LIMITED=limit is not None, BD=TILE, num_warps=4,
    )  # fmt: skip
    return y
