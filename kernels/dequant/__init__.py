"""Dequantisation of GGML block formats to float32."""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kernels.dequant import naive, with_torch
from kernels.dispatch import pick

SLICE_ELEMENTS = 2**20  # bounds the temporaries, and a slice stays in the processor's cache


def dequantise(raw: Tensor, type: str, n_elements: int) -> Tensor:
    """Blocks of the GGML type named `type` ("Q4_K"), uint8 [n_bytes], to float32 [n_elements].

    The result has memory of its own. Raises NotImplementedError for a type without a decoder
    and ValueError when the number of bytes is not that of n_elements.
    """
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_blocks = n_elements // block
    if n_elements % block or raw.numel() != n_blocks * block_bytes:
        raise ValueError(f"{raw.numel()} bytes are not {n_elements} elements of {type}")
    blocks = raw.view(n_blocks, block_bytes)
    out = torch.empty(n_blocks, block, dtype=torch.float32)
    fill = _fill(type)
    step = SLICE_ELEMENTS // block
    for start in range(0, n_blocks, step):
        fill(blocks[start : start + step], out[start : start + step])
    return out.view(-1)


def _naive(type: str) -> with_torch.Decoder:
    def fill(blocks: Tensor, out: Tensor) -> None:
        out.copy_(naive.dequantise_slice(blocks.flatten(), type).view_as(out))

    return fill


def _fastest(type: str) -> with_torch.Decoder:
    return with_torch.DECODERS.get(type) or _naive(type)


_fill = pick(_naive, _fastest)
