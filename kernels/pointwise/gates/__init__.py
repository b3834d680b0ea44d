"""Gates: how much of its state a head keeps, how much it writes, and how much it gives out."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.pointwise.gates import naive, with_torch

_LLVM = "kernels.pointwise.gates.with_llvm"
_run = pick(naive.delta_gates, with_torch.delta_gates, None, _LLVM)
_invariant = pick(with_torch.delta_gates_invariant, with_torch.delta_gates_invariant, None, _LLVM)
_steps = pick(naive.step_gates, with_torch.step_gates, None, _LLVM)
_steps_invariant = pick(
    with_torch.step_gates_invariant, with_torch.step_gates_invariant, None, _LLVM
)

_output = pick(naive.output_gate, with_torch.output_gate, None, _LLVM)
_output_invariant = pick(
    with_torch.output_gate_invariant, with_torch.output_gate_invariant, None, _LLVM
)


def delta_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    *,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = softplus(decay + dt) * a and sigmoid(beta), as kernels.recurrence.delta_rule takes them.

    decay, beta: f32 [..., H], a layer's projections, any strides; dt, a: f32 [H], a = -exp(A_log)
    (Yang et al. 2024, arXiv 2412.06464, after Mamba 2). Returns (g, beta), both [..., H].
    Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_invariant if invariant else _run)(decay, dt, a, beta)


def step_gates(
    step: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, *, invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """dt = softplus(step + dt) and g = dt * a, as kernels.recurrence.ssd takes them.

    step: f32 [..., H], a layer's projection, any strides; dt, a: f32 [H], a = -exp(A_log) (Dao & Gu
    2024, arXiv 2405.21060). Returns (dt, g), both [..., H]. Differentiable. invariant: as above.
    """
    return (_steps_invariant if invariant else _steps)(step, dt, a)


def output_gate(x: torch.Tensor, gate: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """x * sigmoid(gate). x, gate: f32 [..., d] of one shape, or gate [..., 1]; any strides.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_output_invariant if invariant else _output)(x, gate)
