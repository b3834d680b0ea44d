"""The gated delta rule: the recurrent core of a Gated DeltaNet layer."""

from __future__ import annotations

import torch

from kernels.delta_rule import naive, with_torch
from kernels.dispatch import pick

_run = pick(naive.gated_delta_rule, with_torch.gated_delta_rule)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    grouped: bool,
    n_snapshots: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs T tokens through the recurrence and keeps the newest states.

    Per value head, with S [d_k, d_v]:  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;
    o = S^T q / sqrt(d_k), read after the write (Yang et al. 2024, arXiv 2412.06464).

    q, k: [B, T, H_k, d_k], both already l2-normalised. v: [B, T, H_v, d_v], H_v a multiple of
    H_k. g: log decay <= 0, [B, T, H_v], or [B, T, H_v, d_k] for one gate per key channel (KDA).
    beta: [B, T, H_v]. state: [B, H_v, d_k, d_v], left unchanged. All f32, T >= 1, any strides.
    Value head j reads key head j // (H_v / H_k) if `grouped`, else j mod H_k ("tiled").

    Returns o [B, T, H_v, d_v] and the snapshots [B, min(T, n_snapshots), H_v, d_k, d_v], where
    index s is the state s tokens before the last one, so 0 is the state after all T tokens.
    n_snapshots >= 1. They share no memory with `state`. Differentiable for n_snapshots = 1; more
    than one cannot be had of tensors that need gradients.
    """
    return _run(q, k, v, g, beta, state, grouped=grouped, n_snapshots=n_snapshots)
