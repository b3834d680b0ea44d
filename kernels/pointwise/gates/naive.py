"""The gates as their formulas read."""

from __future__ import annotations

import torch


def delta_gates(
    decay: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.delta_gates."""
    return _softplus(decay + dt) * a, 1 / (1 + torch.exp(-beta))


def step_gates(
    step: torch.Tensor, dt: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.step_gates."""
    size = _softplus(step + dt)
    return size, size * a


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.gates.output_gate."""
    return x / (1 + torch.exp(-gate))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), without an e^x that overflows."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
