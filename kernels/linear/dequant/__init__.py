"""Dequantisation of GGML block formats to float32."""

from __future__ import annotations

import functools

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kernels.dispatch import pick, uses_llvm
from kernels.linear.dequant import naive, with_torch

__all__ = ["dequantise"]


def dequantise(raw: Tensor, type: str, n_elements: int) -> Tensor:
    """Blocks of the GGML type named `type` ("Q4_K"), uint8 [n_bytes], to float32 [n_elements].

    The result has memory of its own where `raw` is; temporaries are those of one slice, whatever
    the size. Raises NotImplementedError for a type without a decoder and ValueError when the number
    of bytes is not that of n_elements.
    """
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_blocks, rest = divmod(n_elements, block)
    if rest or raw.numel() != n_blocks * block_bytes:
        raise ValueError(f"{raw.numel()} bytes are not {n_elements} elements of {type}")
    if raw.storage_offset() % 4:
        raw = raw.clone()  # decoders read whole words
    blocks = raw.view(n_blocks, block_bytes)
    out = torch.empty(n_blocks, block, dtype=torch.float32, device=raw.device)
    decode = _decoder(type) if raw.device.type == "cpu" else _torch_or_naive(type)
    step = with_torch.SLICE_ELEMENTS // block
    for start in range(0, n_blocks, step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.view(-1)


def _torch_or_naive(type: str) -> with_torch.Decoder:
    return with_torch.DECODERS.get(type) or naive.decoder(type)


def _fastest(type: str) -> with_torch.Decoder:
    if uses_llvm():
        # here, because it loads the compiler
        from kernels.linear.dequant import with_llvm

        if with_llvm.has(type):
            return functools.partial(with_llvm.fill, type)
    return _torch_or_naive(type)


_decoder = pick(naive.decoder, _fastest)
