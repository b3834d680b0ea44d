"""The gates in few operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.llvm.pointwise import pointwise


def delta_gates(
    decay: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.delta_gates."""
    return functional.softplus(decay + dt) * a, beta.sigmoid()


def delta_gates_invariant(
    decay: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """delta_gates, with each result's bits independent of the numbers around it."""
    g = pointwise(functional.softplus, decay + dt, invariant=True) * a
    return g, pointwise(torch.sigmoid, beta, invariant=True)


def step_gates(
    step: torch.Tensor, dt: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.pointwise.gates.step_gates."""
    size = functional.softplus(step + dt)
    return size, size * a


def step_gates_invariant(
    step: torch.Tensor, dt: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """step_gates, with each result's bits independent of the numbers around it."""
    size = pointwise(functional.softplus, step + dt, invariant=True)
    return size, size * a


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.gates.output_gate."""
    return x * torch.sigmoid(gate)


def output_gate_invariant(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """output_gate, with each result's bits independent of the numbers around it."""
    return x * pointwise(torch.sigmoid, gate, invariant=True)
