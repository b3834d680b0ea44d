"""Weights as their file stores them: GGUF blocks, and matrices put together from unlike parts.

In mode "blocks" nothing is rounded that the file had not rounded: block_linear expands every
weight to the number that gguf-py gives, and sums in f32. In mode "bf16" it rounds the number. In
mode "q8" the integers of the blocks meet rows of integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kernels.dispatch import uses_llvm
from kernels.linear import integer_blocks
from kernels.linear.block_linear import TYPES, block_linear
from kernels.linear.decode_with_llvm import HALVES
from kernels.linear.packed import BlockData, PackedWeight

# plain numbers come in groups of this many
GROUP = 32


def stays_in_blocks(type: str, mode: str, device: torch.device) -> bool:
    """Whether a matrix of a GGML type is multiplied in this mode without being expanded before."""
    if mode == "q8":
        on_cpu = device.type == "cpu"
        return type in (integer_blocks.TYPES if on_cpu else integer_blocks.GPU_TYPES)
    here = mode == "blocks" or (mode == "bf16" and device.type == "cpu" and uses_llvm())
    return here and type in TYPES


def stays_in_halves(type: str, width: int, mode: str, device: torch.device) -> bool:
    """Whether a matrix of numbers of 16 bits, `width` in a row, is multiplied as it is stored where
    it would become f32: the bits are those of f32 (`stays_plain`), half the memory is read."""
    is_half = type in HALVES and width % GROUP == 0 and device.type == "cpu"
    return is_half and mode in ("f32", "blocks", "q8") and uses_llvm()


def stays_plain(weight: Tensor, mode: str) -> bool:
    """Whether a weight f32 is multiplied as it is, as if its numbers were blocks: products of few
    rows then read it as fast as memory allows, and a row's bits do not depend on the other rows."""
    fits = weight.shape[1] % GROUP == 0 and weight.device.type == "cpu"
    return mode == "f32" and fits and uses_llvm()


def pack_plain(weight: Tensor) -> PackedWeight:
    """A weight f32 [out, in] to be multiplied as it is, without a copy where it is contiguous."""
    return pack_blocks(weight.contiguous().view(torch.uint8), "F32", "f32")


def pack_blocks(
    blocks: Tensor, type: str, mode: str = "blocks", scale: float | None = None
) -> PackedWeight:
    """A weight that stays in its blocks, uint8 [out, bytes per row], kept where they are.

    type: one of kernels.linear.block_linear.TYPES, or F32, F16 and BF16, whose mode is "f32"
    whatever is given; in mode "q8" of kernels.linear.integer_blocks.TYPES.
    mode: "blocks", "bf16" or "q8". scale: of the whole matrix, on a processor.
    """
    mode = "f32" if type in (*HALVES, "F32") else mode
    elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_in = blocks.shape[1] // n_bytes * elements
    factors = None if scale is None else torch.full((len(blocks),), scale)
    n_bytes = blocks.numel() + (0 if factors is None else factors.nbytes)
    shape, data = (len(blocks), n_in), BlockData(blocks, type)
    return PackedWeight(mode, shape, n_bytes, data, factors=factors)


def stack_weights(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Matrices of equal width stacked: [sum of out, in], each part in a mode of its own."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return PackedWeight("parts", shape, sum(part.n_bytes for part in parts), tuple(parts))


def takes_any_rows(packed: PackedWeight) -> bool:
    """Whether `linear` prepares rows for every matrix anew: for blocks, parts, and rounded rows."""
    return packed.mode == "parts" or bool(packed.rounding) or isinstance(packed.data, BlockData)


def linear_blocks(x: Tensor, packed: PackedWeight, *, invariant: bool) -> Tensor:
    """See kernels.linear.linear, for data in blocks."""
    blocks, rounded = packed.data, packed.mode == "bf16"
    if packed.mode == "q8":
        return integer_blocks.integer_linear(x, blocks.bytes, blocks.type, invariant=invariant)
    return block_linear(x, blocks.bytes, blocks.type, rounded=rounded, invariant=invariant)
