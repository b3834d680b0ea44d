"""SwiGLU in two operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.llvm.pointwise import pointwise


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See kernels.pointwise.swiglu.swiglu."""
    return _product(functional.silu(gate), up, limit)


def swiglu_invariant(
    gate: torch.Tensor, up: torch.Tensor, limit: float | None = None
) -> torch.Tensor:
    """swiglu, with each result's bits independent of the numbers around it."""
    return _product(pointwise(functional.silu, gate, invariant=True), up, limit)


def _product(opened: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    if limit is not None:
        opened, up = opened.clamp(max=limit), up.clamp(-limit, limit)
    return opened * up
