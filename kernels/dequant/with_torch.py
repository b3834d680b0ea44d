"""Vectorised dequantisation of the common GGML block formats, bit-identical to gguf-py.

Each decoder takes blocks uint8 [n, bytes per block] and fills out float32 [n, elements per
block]. Bits agree because the same float32 products and differences are formed in the same
order, each rounded on its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Decoder = Callable[[Tensor, Tensor], None]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# byte value -> its eight bits as bytes of 0 or 16, packed into one int64
_FIFTH_BITS = (
    (((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1) << 4)
    .to(torch.uint8)
    .view(torch.int64)
    .flatten()
)


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """float16 values at byte `start` of each block, as float32 [n, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """uint8 [n, m] to [n, 2m]: of every `run` bytes first the low halves, then the high ones."""
    words = packed.contiguous().view(torch.int32).unflatten(1, (-1, run // 4))
    halves = torch.stack([words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F], 2)
    return halves.flatten(1).view(torch.uint8)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4] to [n, 32]: 16 for each bit that is set, lowest bit first, else 0."""
    flat = _FIFTH_BITS.index_select(0, packed.flatten().int())
    return flat.view(torch.uint8).view(-1, 32)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(blocks[:, 2:], 16).sub_(8).view(torch.int8)
    out.copy_(q).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks, 0, 2)
    out.copy_(_nibbles(blocks[:, 4:], 16)).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    q = _nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    out.copy_(q.sub_(16).view(torch.int8)).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks, 0, 2)
    q = _nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    out.copy_(q).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the eight runs of 32 of a Q4_K or Q5_K block, [n, 8, 1] each.

    Twelve bytes hold eight 6-bit scales and offsets: four of each in the low bits of the first
    eight bytes, the others in the nibbles of the last four and the top bits of the first eight.
    """
    words = blocks[:, 4:16].contiguous().view(torch.int32)
    first, rest = words[:, :2], words[:, 2:]
    low = first & 0x3F3F3F3F
    nibbles = (rest >> torch.tensor([0, 4], dtype=torch.int32)) & 0x0F0F0F0F
    high = nibbles | ((first >> 2) & 0x30303030)
    whole = torch.stack([low, high], 2).view(torch.uint8).view(-1, 2, 8).float()
    products = whole.mul_(_half(blocks, 0, 2).unsqueeze(-1)).unsqueeze(-1)
    return products[:, 0], products[:, 1]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, offsets = _k_scales(blocks)
    out.copy_(_nibbles(blocks[:, 16:], 32))
    out.unflatten(1, (8, 32)).mul_(scales).sub_(offsets)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, offsets = _k_scales(blocks)
    q = _nibbles(blocks[:, 48:], 32).unflatten(1, (8, 32))
    high = blocks[:, 16:48].unsqueeze(1)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    q.bitwise_or_(((high >> shifts) & 1) << 4)
    out.copy_(q.flatten(1))
    out.unflatten(1, (8, 32)).mul_(scales).sub_(offsets)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    q = _nibbles(blocks[:, :128], 64).unflatten(1, (2, 4, 32))
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    q.bitwise_or_(((high >> shifts) & 3) << 4)
    out.copy_(q.flatten(1).sub_(32).view(torch.int8))
    out.unflatten(1, (16, 16)).mul_(scales.unsqueeze(-1))


def _iq4_values(packed: Tensor) -> Tensor:
    """Sixteen bytes of table indices per 32 elements to their values, float32 [n, 2m]."""
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    q = _nibbles(packed, 16)
    return table.index_select(0, q.flatten().int()).view(q.shape)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_iq4_values(blocks[:, 2:]), _half(blocks, 0), out=out)


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).sub_(32).view(torch.int8).float() * _half(blocks, 0)
    values = _iq4_values(blocks[:, 8:]).unflatten(1, (8, 32))
    torch.mul(values, scales.unsqueeze(-1), out=out.unflatten(1, (8, 32)))


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.view(torch.uint8).copy_(blocks)


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.bfloat16))


DECODERS: dict[str, Decoder] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
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
