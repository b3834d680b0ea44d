"""Attention one query and one head at a time, over gathered visible cells only."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.attention.attend. Unlike the fast version it never reads a hidden cell."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    n_batch, n_tokens, n_heads, _ = q.shape
    repeat = n_heads // k.shape[1]
    rows = []
    for b in range(n_batch):
        for t in range(n_tokens):
            cells = mask[b, t].nonzero().squeeze(1)
            for h in range(n_heads):
                keys, values = k[b, h // repeat, cells], v[b, h // repeat, cells]
                scores = keys @ q[b, t, h] * scale
                most = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[h])
                weights = torch.exp(scores - most)
                sink = 0.0 if sinks is None else torch.exp(sinks[h] - most)
                rows.append((weights / (weights.sum() + sink)) @ values)
    return torch.stack(rows).reshape(n_batch, n_tokens, n_heads, v.shape[3])
