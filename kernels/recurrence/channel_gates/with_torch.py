"""The gates in few operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.whole_vectors import pointwise


def channel_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
    *,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.recurrence.channel_gates.channel_gates."""
    x, written = decay + dt, pointwise(torch.sigmoid, beta, invariant=invariant)
    if bound is None:
        return pointwise(functional.softplus, x, invariant=invariant) * a, written
    return pointwise(torch.sigmoid, x * -a, invariant=invariant) * bound, written


def channel_gates_invariant(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """channel_gates, with each result's bits independent of the numbers around it."""
    return channel_gates(decay, dt, a, beta, bound, invariant=True)
