"""SwiGLU in two operations."""

from __future__ import annotations

import torch
from torch.nn import functional


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See kernels.swiglu.swiglu."""
    return functional.silu(gate) * up
