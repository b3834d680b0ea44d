"""SwiGLU in two operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.pointwise import pointwise


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See kernels.swiglu.swiglu."""
    return functional.silu(gate) * up


def swiglu_invariant(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """swiglu, with each result's bits independent of the numbers around it."""
    return pointwise(functional.silu, gate, invariant=True) * up
