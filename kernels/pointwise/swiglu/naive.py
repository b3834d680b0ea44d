"""SwiGLU as its formula reads."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """See kernels.pointwise.swiglu.swiglu."""
    opened = gate * torch.sigmoid(gate)
    if limit is not None:
        opened, up = opened.clamp(max=limit), up.clamp(-limit, limit)
    return opened * up
