"""Rotary position embedding, NEOX pairing, over the first dimensions of a head."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rope import naive, with_torch

_table = pick(naive.rope_table, with_torch.rope_table)
_apply = pick(
    naive.apply_rope, with_torch.apply_rope, "kernels.rope.with_triton", "kernels.rope.with_llvm"
)


def rope_table(
    positions: torch.Tensor, n_rot: int, inv_freq: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of position * inv_freq, both times `scale`.

    positions: int64, any shape; inv_freq: [n_rot / 2], radians per position (0 = no rotation,
    scaling of the context already in it). Angles are formed in f64, since a long position times
    a rounded frequency would lose the phase. Returns (cos, sin), each f32
    [*positions.shape, n_rot / 2].
    """
    return _table(positions, n_rot, inv_freq, scale)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[j], x[j + n_rot / 2]) of every head (Su et al. 2021, arXiv 2104.09864).

    x: f32 [B, T, H, hd]; cos, sin: f32 [B, T, n_rot / 2] with n_rot <= hd, as from rope_table.
    Dimensions from n_rot on pass through. Returns a new [B, T, H, hd]. Differentiable in x.
    """
    return _apply(x, cos, sin)
