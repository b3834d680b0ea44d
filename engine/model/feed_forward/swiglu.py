"""The dense feed-forward part with a gate."""

from __future__ import annotations

import torch

from engine.model.feed_forward.gating import opener
from engine.model.parts.feed_forward import SwigluPart
from engine.model.weights import Weights


class Swiglu:
    """down(silu(gate x) * up x), or what the part has in place of SwiGLU. suffix: of the tensors'
    names."""

    def __init__(self, part: SwigluPart, weights: Weights, suffix: str = "") -> None:
        self._sizes = [part.width, part.width]
        self._open = opener(part.gating)
        self._gate_up = weights.biased(f"ffn_gate{suffix}", f"ffn_up{suffix}")
        self._down = weights.biased(f"ffn_down{suffix}")

    def __call__(self, x: torch.Tensor, *, invariant: bool) -> torch.Tensor:
        """x [..., n_embd] -> the same shape."""
        gate, up = self._gate_up(x, invariant=invariant).split_with_sizes(self._sizes, -1)
        return self._down(self._open(gate, up, invariant=invariant), invariant=invariant)
