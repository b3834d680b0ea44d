"""Dequantisation of GGML block formats to float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kernels.dispatch import pick, uses_llvm
from kernels.linear import decode_with_llvm
from kernels.linear.block_parts import SPLITTERS, grain
from kernels.linear.decode_with_llvm import LANES, sizes
from kernels.llvm import Code, Value, kernel
from kernels.llvm.functions import addresses


def dequantise(raw: Tensor, type: str, n_elements: int) -> Tensor:
    """Blocks of the GGML type named `type` ("Q4_K"), uint8 [n_bytes], to float32 [n_elements].

    The result has memory of its own where `raw` is; temporaries are those of one slice on the
    processor, whatever the size. Raises NotImplementedError for a type without a decoder and
    ValueError when the number of bytes is not that of n_elements.
    """
    if type not in GGMLQuantizationType.__members__:
        raise NotImplementedError(f"no decoder of {type}")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_blocks, rest = divmod(n_elements, block)
    if rest or raw.numel() != n_blocks * block_bytes:
        raise ValueError(f"{raw.numel()} bytes are not {n_elements} elements of {type}")
    if raw.storage_offset() % 4:
        raw = raw.clone()  # decoders read whole words
    blocks = raw.view(n_blocks, block_bytes)
    out = torch.empty(n_blocks, block, dtype=torch.float32, device=raw.device)
    decode = _decoder(type) if raw.device.type == "cpu" else _on_gpu(type)
    step = SLICE_ELEMENTS // block if raw.device.type == "cpu" else max(n_blocks, 1)
    for start in range(0, n_blocks, step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.view(-1)


def decodes_on_gpu(type: str) -> bool:
    """Whether blocks of this GGML type can be decoded where a GPU has them."""
    return type in DECODERS or type in OF_PARTS


def _on_gpu(type: str) -> Decoder:
    if not decodes_on_gpu(type):
        raise NotImplementedError(f"no decoder of {type} for a GPU")
    return DECODERS.get(type) or OF_PARTS[type]


def _fastest(type: str) -> Decoder:
    if uses_llvm() and type in decode_with_llvm.DECODERS:
        return functools.partial(_fill_with_llvm, type)
    return DECODERS.get(type) or naive_decoder(type)


def naive_decoder(type: str) -> Callable[[Tensor, Tensor], None]:
    """A function that takes blocks uint8 [n, bytes per block] and fills out float32 [n, elements].

    It raises NotImplementedError for a type that gguf-py has no decoder for.
    """

    def decode(blocks: Tensor, out: Tensor) -> None:
        with np.errstate(all="ignore"):  # infinite scales are legal; so is what becomes of them
            values = dequantize(blocks.contiguous().numpy(), GGMLQuantizationType[type])
        out.numpy()[:] = values

    return decode


# Vectorised dequantisation of the common GGML block formats, bit-identical to gguf-py.
#
# A decoder takes blocks uint8 [n, bytes per block] and fills out float32 [n, elements per block].
# Bits agree because the same float32 products and sums are formed in the same order, each rounded
# on its own. No operation exceeds GRAIN elements on a CPU, given at most SLICE_ELEMENTS per call.
Decoder = Callable[[Tensor, Tensor], None]
SLICE_ELEMENTS = 2**17


def _of_parts(type: str) -> Decoder:
    """The decoder of a type in blocks of integers."""

    def fill(blocks: Tensor, out: Tensor) -> None:
        parts = SPLITTERS[type](blocks)
        factors = [parts.scale[:, None]]
        if parts.group_scales is not None:
            factors[0] = factors[0] * parts.group_scales.float()
        if parts.minimum is not None and parts.group_minimums is not None:
            factors.append((parts.minimum[:, None] * parts.group_minimums.float()).neg_())
        elif parts.minimum is not None:
            factors.append(parts.minimum)
        run = out.numel() // factors[0].numel()
        rows = grain(out) // run
        pieces = [x.view(-1, run).split(rows) for x in (out, parts.integers)]
        pieces += [x.reshape(-1, 1).split(rows) for x in factors]
        for to, values, factor, *summand in zip(*pieces, strict=True):
            to.copy_(values)
            if parts.zero:
                to.sub_(parts.zero)
            to.mul_(factor)
            if summand:
                to.add_(summand[0])

    return fill


def _plain(dtype: torch.dtype) -> Decoder:
    def fill(blocks: Tensor, out: Tensor) -> None:
        values = blocks.view(dtype).flatten()
        size = grain(out)
        for to, part in zip(out.flatten().split(size), values.split(size), strict=True):
            to.copy_(part)

    return fill


OF_PARTS: dict[str, Decoder] = {type: _of_parts(type) for type in ("Q2_K", "Q3_K", "MXFP4")}
"""Types that only a GPU decodes here; on the processor gguf-py does."""
DECODERS: dict[str, Decoder] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    **{type: _of_parts(type) for type in SPLITTERS if type not in OF_PARTS},
}


CHUNK = 128
"""Blocks worth a thread's while."""


def _fill_with_llvm(type: str, blocks: Tensor, out: Tensor) -> None:
    """blocks uint8 [n, bytes per block] -> out f32 [n, elements per block], both contiguous."""
    n_blocks, rest = divmod(out.numel(), sizes(type)[0])
    if rest:  # of numbers without blocks
        DECODERS[type](blocks, out)
    else:
        threads = torch.get_num_threads()
        _program(type)(*addresses(blocks, out), tasks=n_blocks, chunk=CHUNK, threads=threads)


@kernel(2)
def _program(code: Code, args: Sequence[Value], b: Value, type: str) -> None:
    blocks, out = args
    elements, n_bytes = sizes(type)
    for i, weights in enumerate(decode_with_llvm.decode(code, type, blocks + b * n_bytes)):
        code.store(weights, out + b * (4 * elements) + 4 * LANES * i)


_decoder = pick(naive_decoder, _fastest)
