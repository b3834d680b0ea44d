"""Weights as their file stores them: GGUF blocks, and matrices put together from unlike parts.

Nothing is rounded that the file had not rounded: block_linear expands every weight to the number
that gguf-py gives, and sums in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.block_linear import block_linear
from kernels.linear.packed import Packed


class Blocks(NamedTuple):
    """The data of a matrix of mode "blocks": uint8 [out, bytes per row] of a GGML type."""

    bytes: torch.Tensor
    type: str


def pack_blocks(blocks: torch.Tensor, type: str) -> Packed:
    """A weight that stays in its blocks, uint8 [out, bytes per row], kept where they are.

    type: one of kernels.block_linear.TYPES.
    """
    elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_in = blocks.shape[1] // n_bytes * elements
    return Packed("blocks", (blocks.shape[0], n_in), blocks.numel(), Blocks(blocks, type))


def beside(parts: Sequence[Packed]) -> Packed:
    """Matrices of equal width, in whatever modes, as one whose rows are theirs in turn."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return Packed("parts", shape, sum(part.n_bytes for part in parts), tuple(parts))


def linear_blocks(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See kernels.linear.linear, for mode "blocks"."""
    return block_linear(x, packed.data.bytes, packed.data.type)
