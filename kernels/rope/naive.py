"""Rotary position embedding pair by pair."""

from __future__ import annotations

import math

import torch


def rope_table(
    positions: torch.Tensor, n_rot: int, inv_freq: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rope.rope_table."""
    frequencies = [float(f) for f in inv_freq]
    angles = [[int(p) * frequencies[j] for j in range(n_rot // 2)] for p in positions.flatten()]
    shape = (*positions.shape, n_rot // 2)
    cos = torch.tensor([[scale * math.cos(a) for a in row] for row in angles])
    sin = torch.tensor([[scale * math.sin(a) for a in row] for row in angles])
    return cos.reshape(shape), sin.reshape(shape)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels.rope.apply_rope."""
    half = cos.shape[-1]
    columns = list(x.unbind(-1))
    for j in range(half):
        a, b = x[..., j], x[..., j + half]
        cos_j, sin_j = cos[..., j].unsqueeze(-1), sin[..., j].unsqueeze(-1)
        columns[j] = a * cos_j - b * sin_j
        columns[j + half] = b * cos_j + a * sin_j
    return torch.stack(columns, -1)
