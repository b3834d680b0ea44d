"""What a delta rule takes of a layer's projections: unit queries and keys, and gates; on a GPU one
launch."""

from __future__ import annotations

import torch

from kernels.dispatch import runs_triton
from kernels.norm import l2_norm
from kernels.pointwise import delta_gates
from kernels.recurrence.channel_gates import channel_gates

RawGates = tuple[float, torch.Tensor, torch.Tensor, float | None]
"""eps, dt, a and bound of `normed_and_gated`."""


def normed_and_gated(
    qk: torch.Tensor,
    eps: float,
    decay: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    beta: torch.Tensor,
    bound: float | None = None,
    *,
    invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """l2_norm(qk, eps), and kernels.pointwise.delta_gates of heads, decay [B, T, H], or
    kernels.recurrence.channel_gates of channels, decay [B, T, C], bounded or not.

    qk: f32 [B, T, H_qk, d], queries and keys. Returns qk, g of the shape of decay, and beta
    [B, T, H].
    """
    if runs_triton(qk):
        from kernels.recurrence import with_triton

        return with_triton.normed_and_gated(qk, eps, decay, dt, a, beta, bound)
    qk = l2_norm(qk, eps)
    if decay.shape == beta.shape and bound is None:
        return qk, *delta_gates(decay, dt, a, beta, invariant=invariant)
    return qk, *channel_gates(decay, dt, a, beta, bound, invariant=invariant)
