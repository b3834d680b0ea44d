"""The dense feed-forward part."""

from __future__ import annotations

import torch

from engine.model.parts.feed_forward import SwigluPart
from engine.model.weights import Weights
from kernels.swiglu import swiglu


class Swiglu:
    """down(silu(gate x) * up x). suffix: of the tensors' names."""

    def __init__(self, part: SwigluPart, weights: Weights, suffix: str = "") -> None:
        self._sizes = [part.width, part.width]
        self._gate_up = weights.project(f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight")
        self._down = weights.project(f"ffn_down{suffix}.weight")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [..., n_embd] -> the same shape."""
        gate, up = self._gate_up(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        return self._down(swiglu(gate, up, invariant=invariant), invariant=invariant)
