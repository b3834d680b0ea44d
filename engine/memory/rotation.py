"""Moving stored keys to other positions: a rotated key is rotated on by the shift."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.rope import RopeConfig
from kernels.rope import apply_rope, rope_table

Rotate = Callable[[torch.Tensor, int], torch.Tensor]


def key_rotation(config: RopeConfig) -> Rotate:
    """A function that turns keys [..., head_dim] by a number of positions, which may be negative.

    Rotations add up, so this equals having written the keys at the shifted positions; the
    magnitude that some scalings give to cosines and sines is in the keys already.
    """
    inverse = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)

    def rotate(k: torch.Tensor, shift: int) -> torch.Tensor:
        cos, sin = rope_table(torch.tensor([[shift]]), config.n_rot, inverse)
        heads = k.reshape(1, 1, -1, k.shape[-1])
        return apply_rope(heads, cos.to(k.device), sin.to(k.device)).view(k.shape)

    return rotate
