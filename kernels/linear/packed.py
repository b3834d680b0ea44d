"""Weights prepared for one compute mode, and numbers rounded to the integers of the int8 modes.

int8x2 gives every row of activations two rows of 8 bits, some 15 bits together: with z = x /
largest * 127, the first is z rounded, the second what that left over, in steps of 1/254.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.rounding import max_norm

MODES = ("f32", "bf16", "int8", "int8x2")
"""Modes of a matrix that `pack` makes from f32 numbers. There are also "blocks" and "q8", rows
in the GGUF blocks of their file, and "parts", matrices of unlike modes whose results lie side by
side."""
# those that sum integers
INTEGER_MODES = ("int8", "int8x2")
# symmetric: the largest number of a row becomes 127, of weights wherever that adds up exactly
# (kernels.linear.integers.weight_levels), of activations everywhere
WEIGHT_LEVELS = ROW_LEVELS = 127
SECOND_ROW_STEPS = 2 * ROW_LEVELS
"""Steps of the second row of int8x2 in one of the first: what is left over, at most half a step of
the first, becomes -127..127."""
PANEL_OUTPUTS, INPUTS_PER_LANE = 16, 4
"""Weight rows in a panel, and inputs of each that lie together: VNNI instructions multiply four
neighbouring bytes with four and add the products to one sum."""
ROW_MULTIPLE = 16
"""Rows of bytes, of weights and of activations, are filled up with zeros to such a length."""
BYTE_ZERO = 128
"""What a byte is more than its integer, of a weight or, where those of weights have a sign, of x:
VNNI wants one factor without a sign."""


class BlockData(NamedTuple):
    """A matrix in blocks. bytes: uint8 [out, bytes per row]. type: GGML's name, such as "Q4_K"."""

    bytes: Tensor
    type: str


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out, in] ready for `linear`; data belongs to the implementation that packed it.

    n_bytes is what the matrix occupies in memory, scales included. rounding: the GGML type for
    which llama.cpp would round the rows it is multiplied with, so that `linear` does, or None.
    factors: f32 [out], what the results of a matrix in blocks are multiplied with, or None.
    """

    mode: str
    shape: tuple[int, int]
    n_bytes: int
    data: Any
    rounding: str | None = None
    factors: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BytePanels:
    """A weight as bytes in the order in which one instruction after the other reads them.

    bytes: uint8 [panels, in / INPUTS_PER_LANE, PANEL_OUTPUTS, INPUTS_PER_LANE], each the integer
    of a weight plus BYTE_ZERO. scales: f32 [panels * PANEL_OUTPUTS], what a sum of products of
    such integers with those of x, times the largest magnitude of x, is multiplied with; the
    division by ROW_LEVELS, the integer of that magnitude, is in them.
    """

    bytes: Tensor
    scales: Tensor


def quantise_rows(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Symmetric integers in -levels..levels, one scale per output row.

    weight: f32 [out, in]. Returns int8 [out, in] and f32 [out] with weight ~ integers * scale;
    a row of zeros gets the smallest normal scale.
    """
    largest = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny * levels)
    scale = largest / levels
    return (weight / scale.unsqueeze(1)).round().to(torch.int8), scale


def split_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x f32 [..., in] -> both rows of integers as f32, and the largest magnitude [..., 1]:
    x ~ (first + second / SECOND_ROW_STEPS) * largest / ROW_LEVELS."""
    rows, largest = max_norm(x)
    z = rows * ROW_LEVELS
    first = z.round()
    return first, ((z - first) * SECOND_ROW_STEPS).round(), largest


def pack_panels(weight: Tensor, mode: str) -> PackedWeight:
    """A weight f32 [out, in] as BytePanels; mode: one of INTEGER_MODES."""
    n_out, n_in = weight.shape
    integers, scale = quantise_rows(weight, WEIGHT_LEVELS)
    filling = (0, -n_in % ROW_MULTIPLE, 0, -n_out % PANEL_OUTPUTS)
    if any(filling):
        integers = functional.pad(integers, filling)
        scale = functional.pad(scale, filling[2:])
    fours = integers.view(torch.int32).view(-1, PANEL_OUTPUTS, integers.shape[1] // INPUTS_PER_LANE)
    panels = fours.transpose(1, 2).contiguous().view(torch.uint8).bitwise_xor_(BYTE_ZERO)
    data = BytePanels(
        panels.view(*fours.transpose(1, 2).shape, INPUTS_PER_LANE), scale / ROW_LEVELS
    )
    return PackedWeight(mode, (n_out, n_in), data.bytes.nbytes + data.scales.nbytes, data)
