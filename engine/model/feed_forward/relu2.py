"""The dense feed-forward part without a gate."""

from __future__ import annotations

import torch

from engine.model.parts.feed_forward import Relu2Part
from engine.model.weights import Weights
from kernels.pointwise import relu2


class Relu2:
    """down(max(up x, 0)^2). suffix: of the tensors' names."""

    def __init__(self, part: Relu2Part, weights: Weights, suffix: str = "") -> None:
        self._up = weights.biased(f"ffn_up{suffix}")
        self._down = weights.biased(f"ffn_down{suffix}")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [..., n_embd] -> the same shape."""
        return self._down(relu2(self._up(x, invariant=invariant)), invariant=invariant)
