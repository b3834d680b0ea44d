"""SiTU as its formula reads."""

from __future__ import annotations

import torch


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """See kernels.pointwise.situ.situ."""
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
