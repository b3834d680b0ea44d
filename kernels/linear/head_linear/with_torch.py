"""The products of all heads at once."""

from __future__ import annotations

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See kernels.linear.head_linear.head_linear."""
    n_batch, n_tokens, n_heads, n = x.shape
    rows = x.permute(2, 0, 1, 3).reshape(n_heads, n_batch * n_tokens, n)
    return torch.bmm(rows, weight).view(n_heads, n_batch, n_tokens, -1).permute(1, 2, 0, 3)


def head_linear_invariant(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """head_linear token by token."""
    # in memory of its own: sums may depend on alignment
    tokens = [one.clone() for one in x.flatten(0, 1).split(1)]
    y = torch.cat([head_linear(one.unsqueeze(0), weight) for one in tokens], 1)
    return y.view(*x.shape[:3], weight.shape[2])
