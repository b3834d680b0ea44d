"""Weights as bytes in the order in which processors multiply four of them at once (VNNI).

A panel holds 16 outputs: of every four inputs in turn, those of all 16 lie side by side, so that
one instruction adds to 16 sums and none has to be put together from parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.linear.packed import ROW_LEVELS, WEIGHT_LEVELS, Packed, quantise_rows

OUTPUTS, INPUTS = 16, 4
"""Of a panel, and those of them that lie together."""
WHOLE = 16
"""Rows of weights and of activations are filled up with zeros to multiples of this."""
ZERO = 128
"""What is added to the integers: the instruction takes one side without a sign."""


@dataclass(frozen=True, slots=True, eq=False)
class BytePanels:
    """weight ~ (bytes - ZERO) * scales: uint8 [panels, in / INPUTS, OUTPUTS, INPUTS], and f32
    [panels * OUTPUTS], which are less by the factor ROW_LEVELS that integers of x are more."""

    bytes: torch.Tensor
    scales: torch.Tensor


def pack(weight: torch.Tensor, mode: str) -> Packed:
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
