"""The gates as their formulas read."""

from __future__ import annotations

import torch


def channel_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.channel_gates.channel_gates."""
    x, written = decay + dt, 1 / (1 + torch.exp(-beta))
    if bound is not None:
        return bound / (1 + torch.exp(x * a)), written
    # log(1 + e^x), without an e^x that overflows
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))) * a, written
