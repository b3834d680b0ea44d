"""Attention one query and one head at a time, over gathered visible cells only."""

from __future__ import annotations

import math

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """See kernels.attention.attend. Unlike the fast version it never reads a hidden cell."""
    n_batch, n_tokens, n_heads, head_dim = q.shape
    repeat = n_heads // k.shape[1]
    rows = []
    for b in range(n_batch):
        for t in range(n_tokens):
            cells = mask[b, t].nonzero().squeeze(1)
            for h in range(n_heads):
                keys, values = k[b, h // repeat, cells], v[b, h // repeat, cells]
                scores = keys @ q[b, t, h] / math.sqrt(head_dim)
                weights = torch.exp(scores - scores.max())
                rows.append((weights / weights.sum()) @ values)
    return torch.stack(rows).reshape(q.shape)
