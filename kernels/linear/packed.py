"""A weight matrix prepared for one compute mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernels.norm import max_norm

MODES = ("f32", "bf16", "int8", "int8x2")
"""Modes of a matrix that `pack` makes from f32 numbers. Beside them stand "blocks", rows in the
GGUF blocks of their file, and "parts", matrices of unlike modes whose results lie side by side."""
# those that sum integers
INTEGER_MODES = ("int8", "int8x2")
# symmetric: the largest number of a row becomes 127, of weights wherever that adds up exactly
# (kernels.linear.integers.weight_levels), of activations everywhere
WEIGHT_LEVELS = ROW_LEVELS = 127
STEPS = 2 * ROW_LEVELS
"""The rest lies within half a step of the first row, and becomes -127..127."""
OUTPUTS, INPUTS = 16, 4
"""Of a panel, and those of them that lie together."""
WHOLE = 16
"""Rows of weights and of activations are filled up with zeros to multiples of this."""
ZERO = 128
"""What is added to the integers: the instruction takes one side without a sign."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [out, in] ready for `linear`; data belongs to the implementation that packed it.

    n_bytes is what the matrix occupies in memory, scales included.
    """

    mode: str
    shape: tuple[int, int]
    n_bytes: int
    data: Any


@dataclass(frozen=True, slots=True, eq=False)
class BytePanels:
    """weight ~ (bytes - ZERO) * scales: uint8 [panels, in / INPUTS, OUTPUTS, INPUTS], and f32
    [panels * OUTPUTS], which are less by the factor ROW_LEVELS that integers of x are more."""

    bytes: torch.Tensor
    scales: torch.Tensor


def quantise_rows(weight: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric integers in -levels..levels, one scale per output row.

    weight: f32 [out, in]. Returns int8 [out, in] and f32 [out] with weight ~ integers * scale;
    a row of zeros gets the smallest normal scale.
    """
    largest = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny * levels)
    scale = largest / levels
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale


def split_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x f32 [..., in] -> both rows of integers as f32, and the largest magnitude [..., 1]:
    x ~ (first + second / STEPS) * largest / ROW_LEVELS."""
    rows, largest = max_norm(x)
    z = rows * ROW_LEVELS
    first = z.round()
    return first, ((z - first) * STEPS).round(), largest


def pack_panels(weight: torch.Tensor, mode: str) -> Packed:
    """A weight f32 [out, in] as panels, for a mode that sums integers."""
    n_out, n_in = weight.shape
    integers, scale = quantise_rows(weight, WEIGHT_LEVELS)
    filling = (0, -n_in % WHOLE, 0, -n_out % OUTPUTS)
    if any(filling):
        integers = functional.pad(integers, filling)
        scale = functional.pad(scale, filling[2:])
    fours = integers.view(torch.int32).view(-1, OUTPUTS, integers.shape[1] // INPUTS)
    panels = fours.transpose(1, 2).contiguous().view(torch.uint8).bitwise_xor_(ZERO)
    data = BytePanels(panels.view(*fours.transpose(1, 2).shape, INPUTS), scale / ROW_LEVELS)
    return Packed(mode, (n_out, n_in), data.bytes.nbytes + data.scales.nbytes, data)
