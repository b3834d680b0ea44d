"""Rotary position embedding on whole halves."""

from __future__ import annotations

import torch


def rope_table(
    positions: torch.Tensor, n_rot: int, inv_freq: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rope.rope_table."""
    angle = positions.unsqueeze(-1) * inv_freq[: n_rot // 2].double()
    return (angle.cos() * scale).float(), (angle.sin() * scale).float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See kernels.rope.apply_rope."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
