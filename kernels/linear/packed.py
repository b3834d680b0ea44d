"""A weight matrix prepared for one compute mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MODES = ("f32", "bf16", "int8", "int8x2")
"""Modes of a matrix that `pack` makes from f32 numbers. Beside them stand "blocks", rows in the
GGUF blocks of their file, and "parts", matrices of unlike modes whose results lie side by side."""
# those that sum integers
INTEGER_MODES = ("int8", "int8x2")
# symmetric: the largest number of a row becomes 127, of weights wherever that adds up exactly
# (kernels.linear.integers.weight_levels), of activations everywhere
WEIGHT_LEVELS = ROW_LEVELS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [out, in] ready for `linear`; data belongs to the implementation that packed it.

    n_bytes is what the matrix occupies in memory, scales included. rounding: the GGML type for
    which llama.cpp would round the rows it is multiplied with, so that `linear` does, or None.
    """

    mode: str
    shape: tuple[int, int]
    n_bytes: int
    data: Any
    rounding: str | None = None


def quantise_rows(weight: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric integers in -levels..levels, one scale per output row.

    weight: f32 [out, in]. Returns int8 [out, in] and f32 [out] with weight ~ integers * scale;
    a row of zeros gets the smallest normal scale.
    """
    largest = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny * levels)
    scale = largest / levels
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale
