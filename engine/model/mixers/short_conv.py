"""The short convolution as a mixer by itself, between two gates (LFM2)."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.conv_window import ConvInputs, ConvWindow
from engine.model.mixers.mixer import RopeAndMemory
from engine.model.parts.short_conv import ShortConvPart
from engine.model.recurrence import Recurrence, StateKey
from engine.model.weights import Weights
from kernels.pointwise import multiply


def recurrences(part: ShortConvPart) -> dict[str, Recurrence[Any]]:
    """How tokens advance the window of `part`."""
    return {"window": ConvWindow(part.d_conv, part.n_channels, activate=False)}


class ShortConv:
    """c * conv(b * x), where b, c and x are thirds of one projection; its window, rows of b * x,
    lives in the memory."""

    def __init__(
        self, part: ShortConvPart, weights: Weights, config: ModelConfig, layer: int
    ) -> None:
        self._window = StateKey(layer, "window")
        self._input = weights.project("shortconv.in_proj.weight")
        # taps as rows in memory, as the convolution reads them
        self._conv = weights.keep("shortconv.conv.weight").t().contiguous().t()
        self._output = weights.project("shortconv.out_proj.weight")

    def __call__(self, x: torch.Tensor, around: RopeAndMemory) -> torch.Tensor:
        """x [B, T, n_embd], normed -> the same shape; advances the memory's window."""
        memory, invariant = around.memory.recurrent, around.invariant
        assert memory is not None  # a model with recurrent layers is given such a memory
        b, c, x = self._input(x, invariant=invariant).chunk(3, -1)
        convolved = memory.advance(self._window, ConvInputs(multiply(b, x), self._conv))
        return self._output(multiply(c, convolved), invariant=invariant)
