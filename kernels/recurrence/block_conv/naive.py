"""The convolution channel by channel, from its definition."""

from __future__ import annotations

import torch


def block_conv(x: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """See kernels.recurrence.block_conv.block_conv."""
    n_batch, n_tokens, d = x.shape
    n_taps, group = len(base), d // own.shape[3]
    y = torch.zeros_like(x)
    for b in range(n_batch):
        for a in range(n_tokens):
            for tap in range(min(n_taps, a + 1)):
                for j in range(d):
                    weight = base[tap, j] + own[b, a, tap, j // group]
                    y[b, a, j] += weight * x[b, a - tap, j]
    return y
