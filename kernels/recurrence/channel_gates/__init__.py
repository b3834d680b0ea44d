"""The gates of Kimi Delta Attention: what each key channel of a state keeps, what a head writes."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.recurrence.channel_gates import naive, with_torch

_LLVM = "kernels.recurrence.channel_gates.with_llvm"
_run = pick(
    naive.channel_gates,
    with_torch.channel_gates,
    "kernels.recurrence.channel_gates.with_triton",
    _LLVM,
)
_invariant = pick(
    with_torch.channel_gates_invariant, with_torch.channel_gates_invariant, None, _LLVM
)


def channel_gates(
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
    *,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log decay g of every channel, and sigmoid(beta) of every head, as
    kernels.recurrence.delta_rule takes them.

    Without `bound`, g = softplus(decay + dt) * a; with it g = bound * sigmoid(-(decay + dt) * a),
    which is never below bound < 0 (arXiv 2510.26692, and the `safe gate` of later models).

    decay: f32 [..., C], beta: f32 [..., H], a layer's projections, any strides; dt, a: f32 [C], a =
    -exp(A_log) of the channel's head. Returns g [..., C] and [..., H]. Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_invariant if invariant else _run)(decay, dt, a, beta, bound)
