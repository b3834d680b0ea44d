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
from kernels.linear.block_parts import IQ4_LEVELS, split
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


def _torch_or_naive(type: str) -> Decoder:
    return DECODERS.get(type) or naive_decoder(type)


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
    return _torch_or_naive(type)


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
# on its own.
#
# torch spreads an operation over its threads once it has more than GRAIN elements, and then waits
# for the slowest. These operations are so short that the waiting costs more than the threads gain,
# and tens of times as much while other programs use the cores. So no operation here exceeds GRAIN
# elements, given at most SLICE_ELEMENTS per call: bits are unpacked in words of several bytes, the
# float32 work goes in runs of GRAIN.
Decoder = Callable[[Tensor, Tensor], None]
GRAIN = 2**15
SLICE_ELEMENTS = 2**17


@functools.cache
def _iq4_values(device: torch.device) -> Tensor:
    """Kept on the device: a recorded pass uploads nothing."""
    return torch.tensor(IQ4_LEVELS, dtype=torch.int8).to(device)


@functools.cache
def _of_fifth_bits(device: torch.device) -> Tensor:
    """Byte value -> its eight bits, lowest first, as bytes of 0 or 16 packed into one int64."""
    bits = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1) << 4
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def _grain(x: Tensor) -> int:
    """Elements of one operation, at most; a GPU takes all at once."""
    return GRAIN if x.device.type == "cpu" else max(x.numel(), GRAIN)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """float16 values at byte `start` of each block, as float32 [n, count]."""
    return blocks[:, start : start + 2 * count].view(torch.float16).float()


def _words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Bytes start to stop of each block as int32 [n, (stop - start) / 4]."""
    halves = blocks[:, start:stop].view(torch.int16)
    return halves.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _nibbles(words: Tensor, run: int) -> Tensor:
    """int32 [n, m] to [n, 2m]: of every `run` bytes first the low halves, then the high ones."""
    runs = words.unflatten(1, (-1, run // 4))
    return torch.stack([runs & 0x0F0F0F0F, (runs >> 4) & 0x0F0F0F0F], 2).flatten(1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits at byte `start`, lowest first, as bytes of 0 or 16 in int32 [n, 8]."""
    index = blocks[:, start : start + 4].flatten().int()
    return _of_fifth_bits(index.device).index_select(0, index).view(torch.int32).view(-1, 8)


def _spread(words: Tensor, n_bits: int) -> Tensor:
    """int32 [..., m] to [..., 8 / n_bits, m]: each group of bits of every byte, moved to bit 4."""
    shifts = torch.arange(0, 8, n_bits, dtype=torch.int32, device=words.device).unsqueeze(-1)
    mask = 0x01010101 * (2**n_bits - 1)
    return ((words.unsqueeze(-2) >> shifts) & mask) << 4


def _fill(
    out: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None = None, zero: int = 0
) -> None:
    """out = (q - zero) * scale + offset, with scale and offset [n, runs per block]."""
    run = out.numel() // scale.numel()
    rows = _grain(out) // run
    parts = [out.view(-1, run).split(rows), q.view(-1, run).split(rows)]
    parts += [f.reshape(-1, 1).split(rows) for f in (scale, offset) if f is not None]
    for to, values, factor, *summand in zip(*parts, strict=True):
        to.copy_(values)
        if zero:
            to.sub_(zero)
        to.mul_(factor)
        if summand:
            to.add_(summand[0])


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 2, 18), 16)
    _fill(out, q.view(torch.uint8), _half(blocks, 0), zero=8)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 4, 20), 16)
    _fill(out, q.view(torch.uint8), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 6, 22), 16) | _fifth_bits(blocks, 2)
    _fill(out, q.view(torch.uint8), _half(blocks, 0), zero=16)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 8, 24), 16) | _fifth_bits(blocks, 4)
    _fill(out, q.view(torch.uint8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    _fill(out, blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the eight runs of 32 of a Q4_K or Q5_K block, float32 [n, 8] each.

    Twelve bytes hold eight 6-bit scales and eight 6-bit offsets: four of each in the low bits of
    the first eight bytes, the rest in the nibbles of the last four and the top bits of the first.
    """
    words = _words(blocks, 4, 16)
    first, last = words[:, :2], words[:, 2:]
    nibbles = torch.cat([last, last >> 4], 1) & 0x0F0F0F0F
    high = nibbles | ((first >> 2) & 0x30303030)
    whole = torch.stack([first & 0x3F3F3F3F, high], 2).view(torch.uint8).flatten(2).float()
    whole.mul_(_half(blocks, 0, 2).unsqueeze(-1))
    return whole[:, 0], whole[:, 1].neg()


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 16, 144), 32)
    _fill(out, q.view(torch.uint8), *_k_scales(blocks))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 48, 176), 32)
    q.unflatten(1, (8, 8)).bitwise_or_(_spread(_words(blocks, 16, 48), 1))
    _fill(out, q.view(torch.uint8), *_k_scales(blocks))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(_words(blocks, 0, 128), 64)
    high = _words(blocks, 128, 192).unflatten(1, (2, 8))
    q.unflatten(1, (2, 4, 8)).bitwise_or_(_spread(high, 2))
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    _fill(out, q.view(torch.uint8), scale, zero=32)


def _iq4(blocks: Tensor, start: int, stop: int) -> Tensor:
    """The 4-bit indices in bytes start to stop, looked up: int8, block after block."""
    q = _nibbles(_words(blocks, start, stop), 16).view(torch.uint8).flatten()
    values = _iq4_values(q.device)
    return torch.cat([values.index_select(0, part.int()) for part in q.split(_grain(q))])


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    _fill(out, _iq4(blocks, 2, 18), _half(blocks, 0))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    packed = blocks[:, 4:8]
    low = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scale = (low | (high << 4)).float().sub_(32).mul_(_half(blocks, 0))
    _fill(out, _iq4(blocks, 8, 136), scale)


def _of_parts(type: str) -> Decoder:
    """The decoder of a type of which only the integers and their scales are written down."""

    def fill(blocks: Tensor, out: Tensor) -> None:
        parts = split(blocks, type)
        groups = 1 if parts.group_scales is None else parts.group_scales.shape[-1]
        q = parts.integers.unflatten(-1, (groups, -1)).float()
        scale = parts.scale[..., None]
        if parts.group_scales is not None:
            scale = scale * parts.group_scales.float()
        q = q * scale[..., None]
        if parts.minimum is not None and parts.group_minimums is not None:
            q = q - (parts.minimum[..., None] * parts.group_minimums.float())[..., None]
        out.copy_(q.flatten(-2))

    return fill


def _plain(dtype: torch.dtype) -> Decoder:
    def fill(blocks: Tensor, out: Tensor) -> None:
        values = blocks.view(dtype).flatten()
        grain = _grain(out)
        for to, part in zip(out.flatten().split(grain), values.split(grain), strict=True):
            to.copy_(part)

    return fill


DECODERS: dict[str, Decoder] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
OF_PARTS: dict[str, Decoder] = {type: _of_parts(type) for type in ("Q2_K", "Q3_K", "MXFP4")}
"""Further types that a GPU decodes; on the processor gguf-py does."""


CHUNK = 128
"""Blocks worth a thread's while."""


def _fill_with_llvm(type: str, blocks: Tensor, out: Tensor) -> None:
    """blocks uint8 [n, bytes per block] -> out f32 [n, elements per block], both contiguous."""
    n_blocks = len(blocks)
    _program(type)(
        *addresses(blocks, out), tasks=n_blocks, chunk=CHUNK, threads=torch.get_num_threads()
    )


@kernel(2)
def _program(code: Code, args: Sequence[Value], b: Value, type: str) -> None:
    blocks, out = args
    elements, n_bytes = sizes(type)
    for i, weights in enumerate(decode_with_llvm.decode(code, type, blocks + b * n_bytes)):
        code.store(weights, out + b * (4 * elements) + 4 * LANES * i)


_decoder = pick(naive_decoder, _fastest)
