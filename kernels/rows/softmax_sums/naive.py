"""The sums of a softmax in float64."""

from __future__ import annotations

import torch

LEAST = -1e4


def softmax_sums(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.softmax_sums.softmax_sums."""
    s = (x - largest.unsqueeze(1)).clamp_min(LEAST).double()
    return torch.stack((s.exp().sum(1), (s * s.exp()).sum(1)), 1).float()
