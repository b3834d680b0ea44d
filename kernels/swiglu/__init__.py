"""SwiGLU: what a feed-forward network does between its projections."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.dispatch import pick
from kernels.pointwise import pointwise
from kernels.swiglu import naive, with_torch

_run = pick(naive.swiglu, with_torch.swiglu, "kernels.swiglu.with_triton")


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """silu(gate) * up, silu(x) = x / (1 + e^-x) (Shazeer 2020, arXiv 2002.05202).

    gate, up: f32 [..., d], of one shape, any strides. Returns [..., d]. Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    if invariant:
        return pointwise(functional.silu, gate, invariant=True) * up
    return _run(gate, up)
