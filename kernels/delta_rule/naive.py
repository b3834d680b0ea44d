"""The gated delta rule one head and one token at a time, as its definition reads."""

from __future__ import annotations

import math

import torch


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
    """See kernels.delta_rule.gated_delta_rule. Keeps the dtype of its inputs."""
    n_batch, n_tokens, n_k_heads, d_k = k.shape
    n_v_heads = v.shape[2]
    rows, kept = [], []
    for b in range(n_batch):
        for j in range(n_v_heads):
            i = j // (n_v_heads // n_k_heads) if grouped else j % n_k_heads
            S = state[b, j]
            outputs, states = [], []
            for t in range(n_tokens):
                # [1] for a gate per head, [d_k, 1] for a gate per key channel
                S = g[b, t, j].exp().unsqueeze(-1) * S
                u = beta[b, t, j] * (v[b, t, j] - S.T @ k[b, t, i])
                S = S + torch.outer(k[b, t, i], u)
                outputs.append(S.T @ q[b, t, i] / math.sqrt(d_k))
                states.append(S)
            rows.append(torch.stack(outputs))
            kept.append(torch.stack(states[::-1][:n_snapshots]))
    o = torch.stack(rows).unflatten(0, (n_batch, n_v_heads)).transpose(1, 2)
    snapshots = torch.stack(kept).unflatten(0, (n_batch, n_v_heads)).transpose(1, 2)
    return o, snapshots
