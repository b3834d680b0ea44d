"""Integers and scales of blocks: those that a weight's GGUF blocks hold, and the rows of x rounded
to integers of 8 bits with a scale for each block, as ggml has them.

Functions read weight blocks as uint8 [..., bytes of a block]; numbers of several bytes are
little-endian.

A weight type in blocks of 32 ("short") meets ggml's q8_0 or q8_1, which have the same integers; one
in blocks of 256 ("long") meets q8_K. With a the largest magnitude of a block, the integer of a
number x is x * (127 / a), rounded to the nearest, ties to even. The scale is a / 127 rounded to
f16 in short blocks, and 1 / (127 / a) in long ones.

Integers that are undefined are 0: all of a block with an infinity or NaN, whose scale is then no
number either, and so is every result of the row; and all of a block below 127 / FLT_MAX. The scale
of a short block above 8.3e6 is an infinity, so results are infinite or NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from kernels.linear.packed import PackedWeight

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers that four bits stand for; ggml halves the scale instead."""


GRAIN = 2**15
"""Elements of one operation on a CPU, at most: above it torch wakes its threads, and then waits for
the slowest, which costs such short operations more than the threads gain, and tens of times as much
while other programs use the cores. So bits are unpacked in words of several bytes."""


def grain(x: Tensor) -> int:
    """Elements of one operation, at most; a GPU takes all at once."""
    return GRAIN if x.device.type == "cpu" else max(x.numel(), GRAIN)


class IntegerBlockParts(NamedTuple):
    """The weights of a block are (integers - zero) * group_scales * scale, less group_minimums *
    minimum in a long block, plus minimum in a short one.

    integers: [..., elements]. scale: f32 [...]. group_scales: integers [..., groups], of equal
    parts of a long block. minimum: f32 [...]. group_minimums: integers [..., groups]. What a type
    does not have is None.
    """

    integers: Tensor
    scale: Tensor
    group_scales: Tensor | None = None
    minimum: Tensor | None = None
    group_minimums: Tensor | None = None
    zero: int = 0


def split(blocks: Tensor, type: str) -> IntegerBlockParts:
    """The parts of the blocks uint8 [..., n, bytes of a block] of a GGML type, those of 64 numbers
    as two of 32: all integers as int64, with a zero of 0."""
    splitter = SPLITTERS.get(type) or functools.partial(_of_numbers, type=type)
    parts = splitter(blocks.clone(memory_format=torch.contiguous_format).flatten(0, -2))
    parts = parts._replace(integers=parts.integers.long() - parts.zero)
    around = (*blocks.shape[:-2], -1)
    tensors: dict[str, Any] = {
        name: (part if part.is_floating_point() else part.long()).unflatten(0, around)
        for name, part in parts._asdict().items()
        if isinstance(part, Tensor)
    }
    return IntegerBlockParts(**tensors)


# Parts of blocks uint8 [n, bytes of a block], which begin at a whole word of memory.


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as f32 [n]."""
    return blocks[:, start : start + 2].view(torch.float16).float().squeeze(-1)


def _bits(data: Tensor, width: int, run: int = 1) -> Tensor:
    """Bytes [..., m] as int64 [..., 8 m / width]: of every `run` bytes first all the lowest
    `width` bits, then all the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device).unsqueeze(-1)
    fields = (data.unflatten(-1, (-1, 1, run)) >> shifts) & (2**width - 1)
    return fields.flatten(-3).long()


def _words(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Bytes start to stop of each block as int32 [n, (stop - start) / 4]."""
    halves = blocks[:, start:stop].view(torch.int16)
    return halves.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _nibbles(words: Tensor, run: int) -> Tensor:
    """int32 [n, m] to [n, 2m]: of every `run` bytes first the low halves, then the high ones."""
    runs = words.unflatten(1, (-1, run // 4))
    return torch.stack([runs & 0x0F0F0F0F, (runs >> 4) & 0x0F0F0F0F], 2).flatten(1)


@functools.cache
def _of_fifth_bits(device: torch.device) -> Tensor:
    """Byte value -> its eight bits, lowest first, as bytes of 0 or 16 packed into one int64."""
    bits = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1) << 4
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits at byte `start`, lowest first, as bytes of 0 or 16 in int32 [n, 8]."""
    index = blocks[:, start : start + 4].flatten().int()
    return _of_fifth_bits(index.device).index_select(0, index).view(torch.int32).view(-1, 8)


def _spread(words: Tensor, n_bits: int) -> Tensor:
    """int32 [..., m] to [..., 8 / n_bits, m]: each group of bits of every byte, moved to bit 4."""
    shifts = torch.arange(0, 8, n_bits, dtype=torch.int32, device=words.device).unsqueeze(-1)
    mask = 0x01010101 * (2**n_bits - 1)
    return ((words.unsqueeze(-2) >> shifts) & mask) << 4


def _q4_0(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 2, 18), 16)
    return IntegerBlockParts(q.view(torch.uint8), _half(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 4, 20), 16)
    return IntegerBlockParts(q.view(torch.uint8), _half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 6, 22), 16) | _fifth_bits(blocks, 2)
    return IntegerBlockParts(q.view(torch.uint8), _half(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 8, 24), 16) | _fifth_bits(blocks, 4)
    return IntegerBlockParts(q.view(torch.uint8), _half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> IntegerBlockParts:
    return IntegerBlockParts(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> IntegerBlockParts:
    """The scale is half of 2^(e - 127), down to 2^-128, which f32 holds without all its digits."""
    levels = torch.tensor(MXFP4_LEVELS, device=blocks.device)
    exponent = blocks[:, 0].double() - 128
    return IntegerBlockParts(levels[_bits(blocks[:, 1:], 4, 16)], torch.exp2(exponent).float())


def _q2_k(blocks: Tensor) -> IntegerBlockParts:
    scales, integers = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    return IntegerBlockParts(
        integers, _half(blocks, 80), scales & 15, _half(blocks, 82), scales >> 4
    )


def _q3_k(blocks: Tensor) -> IntegerBlockParts:
    """A third bit, of a mask of its own, that is not set takes 4 away."""
    third, low = _bits(blocks[:, :32], 1, 32), _bits(blocks[:, 32:96], 2, 32)
    scales = _bits(blocks[:, 96:104], 4, 8) | (_bits(blocks[:, 104:108], 2, 4) << 4)
    return IntegerBlockParts(low + 4 * third, _half(blocks, 108), scales - 32, zero=4)


def _with_k_scales(blocks: Tensor, q: Tensor) -> IntegerBlockParts:
    """Of the eight runs of 32 of a Q4_K or Q5_K block.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minimums: four of each in the low bits of
    the first eight bytes, the rest in the nibbles of the last four and the top bits of the first.
    """
    words = _words(blocks, 4, 16)
    first, last = words[:, :2], words[:, 2:]
    nibbles = torch.cat([last, last >> 4], 1) & 0x0F0F0F0F
    high = nibbles | ((first >> 2) & 0x30303030)
    whole = torch.stack([first & 0x3F3F3F3F, high], 2).view(torch.uint8).flatten(2)
    halves = _half(blocks, 0), _half(blocks, 2)
    return IntegerBlockParts(q.view(torch.uint8), halves[0], whole[:, 0], halves[1], whole[:, 1])


def _q4_k(blocks: Tensor) -> IntegerBlockParts:
    return _with_k_scales(blocks, _nibbles(_words(blocks, 16, 144), 32))


def _q5_k(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 48, 176), 32)
    q.unflatten(1, (8, 8)).bitwise_or_(_spread(_words(blocks, 16, 48), 1))
    return _with_k_scales(blocks, q)


def _q6_k(blocks: Tensor) -> IntegerBlockParts:
    q = _nibbles(_words(blocks, 0, 128), 64)
    high = _words(blocks, 128, 192).unflatten(1, (2, 8))
    q.unflatten(1, (2, 4, 8)).bitwise_or_(_spread(high, 2))
    scales = blocks[:, 192:208].view(torch.int8)
    return IntegerBlockParts(q.view(torch.uint8), _half(blocks, 208), scales, zero=32)


@functools.cache
def _iq4_values(device: torch.device) -> Tensor:
    """Kept on the device: a recorded pass uploads nothing."""
    return torch.tensor(IQ4_LEVELS, dtype=torch.int8).to(device)


def _iq4(blocks: Tensor, start: int, stop: int) -> Tensor:
    """The 4-bit indices in bytes start to stop, looked up: int8 [n, 2 (stop - start)]."""
    q = _nibbles(_words(blocks, start, stop), 16).view(torch.uint8)
    values = _iq4_values(q.device)
    found = [values.index_select(0, part.int()) for part in q.flatten().split(grain(q))]
    return torch.cat(found).view_as(q)


def _iq4_nl(blocks: Tensor) -> IntegerBlockParts:
    return IntegerBlockParts(_iq4(blocks, 2, 18), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> IntegerBlockParts:
    """A scale has its low four bits in bytes 4 to 7, two more in bytes 2 and 3."""
    packed = blocks[:, 4:8]
    low = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    return IntegerBlockParts(_iq4(blocks, 8, 136), _half(blocks, 0), scales)


@functools.cache
def grid(type: str) -> Tensor:
    """What the indices of a type choose, small integers: int64 [n, 4] or [n, 8]. Those of IQ1
    types are eight times their numbers, which a step of one more or less is added to."""
    of_type = getattr(quants, type)
    of_type.init_grid()
    numbers = torch.from_numpy(of_type.grid).long().squeeze((0, 1))
    return 8 * numbers if type.startswith("IQ1") else numbers


SPLITTERS: dict[str, Callable[[Tensor], IntegerBlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
STEPS = {
    **{"IQ3_S": 1, "IQ3_XXS": 4, "IQ2_S": 8, "IQ2_XS": 8, "IQ2_XXS": 8, "IQ1_S": 8, "IQ1_M": 8},
    **{"TQ2_0": 1, "TQ1_0": 1, "NVFP4": 1024},
}
"""Types whose products only a processor forms, and what part of a block's scale their integers
count."""
_SCALES_AT = {"TQ2_0": 64, "TQ1_0": 52}


def _of_numbers(blocks: Tensor, type: str) -> IntegerBlockParts:
    """The integers times the scales of groups are gguf-py's numbers of blocks with a scale of 1."""
    raw = blocks.numpy().copy()
    if type == "NVFP4":  # it has scales of groups alone
        scale = torch.ones(2 * len(raw))
    elif type == "IQ1_M":  # the upper four bits of each of four words
        words, places = raw[:, 48:].view("<u2"), np.arange(0, 16, 4)
        halves = ((words >> 12).astype("<u2") << places).sum(1, dtype="<u2", keepdims=True)
        scale = torch.from_numpy(halves.view("<f2").astype(np.float32)).squeeze(1)
        words &= 0xFFF
        words |= ((0x3C00 >> places & 15) << 12).astype("<u2")
    else:
        at = _SCALES_AT.get(type, 0)
        scale = _half(blocks, at)
        raw[:, at : at + 2].view("<f2")[:] = 1
    step = STEPS[type]
    numbers = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[type]))
    return IntegerBlockParts((numbers * step).long().view(len(scale), -1), scale / step)


SHORT, LONG = 32, 256
"""Numbers in a block."""
GROUP = 16
"""Numbers that have a sum of their own in a long block; q8_K calls them bsums."""
MOST = 127
"""The largest integer."""


class IntegerRows(NamedTuple):
    """Rows of x f32 [n, in] in blocks of `elements`.

    integers: int64 [n, blocks, elements]. scales: f32 [n, blocks]. sums: f32 [n, blocks], the
    scale before it is rounded times the sum of the integers, rounded to f16; of short blocks only.
    """

    integers: Tensor
    scales: Tensor
    sums: Tensor | None


class PreparedRows(NamedTuple):
    """Rows on a GPU with what products take of them, made in the launch that made the rows.

    numbers: f32 [..., in]. integers: by the numbers that share a sum in them, 0 for short blocks;
    int8 [n, in], f32 [n, blocks], and int32 sums of integers in long blocks.
    """

    numbers: Tensor
    integers: dict[int, IntegerRows]

    @property
    def shape(self) -> torch.Size:
        """Shape of the numbers."""
        return self.numbers.shape

    @property
    def is_cuda(self) -> bool:
        """Whether the numbers are on a CUDA device."""
        return self.numbers.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.numbers.dtype


Rows = Tensor | PreparedRows

Norm = tuple[Tensor, float, Sequence[PackedWeight]]
"""Weight, eps and `reads` of kernels.norm.rms_norm_rows."""


class Residual:
    """What the result of a product is added to, and the norm that the sum goes through next.

    x: f32 [..., d]. normed: the sum after the norm, where a launch on a GPU that added formed it;
    None where none has.
    """

    __slots__ = ("norm", "normed", "x")

    def __init__(self, x: Tensor, norm: Norm | None = None) -> None:
        self.x, self.norm = x, norm
        self.normed: Rows | None = None


def is_long(type: str) -> bool:
    """Whether weights of this GGML type meet rows in long blocks."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type]][0] == LONG


@functools.cache
def check_rows(types: Sequence[str], type: str, n_in: int, n_bytes: int) -> None:
    """Raise ValueError for a GGML type that is not one of these, and where its weights do not take
    this many bytes in a row of n_in."""
    if type not in types:
        raise ValueError(f"no product with blocks of {type}, only with {', '.join(types)}")
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    n_blocks, rest = divmod(n_in, elements)
    if rest or n_bytes != n_blocks * block_bytes:
        raise ValueError(f"{n_bytes} bytes are no row of {n_in} {type} weights")


def quantise(x: Tensor, *, long: bool) -> IntegerRows:
    """x f32 [n, in], in whole blocks."""
    blocks = x.unflatten(-1, (-1, LONG if long else SHORT))
    largest = blocks.abs().amax(-1)
    # `MOST / largest` would be MOST times a rounded 1 / largest
    factor = torch.full_like(largest, MOST) / largest
    steps = blocks * factor.unsqueeze(-1)
    integers = torch.where(steps.isfinite(), steps, 0.0).round().long()
    if long:
        return IntegerRows(integers, 1 / factor, None)
    exact = largest / MOST
    return IntegerRows(integers, exact.half().float(), (exact * integers.sum(-1)).half().float())


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_llama_cpp(packed: PackedWeight, type: str) -> PackedWeight:
    """A weight, of this GGML type in its file, that `linear` multiplies with such rows."""
    return replace(packed, rounding=None if type == "F32" else type)


def round_rows(x: torch.Tensor, type: str) -> torch.Tensor:
    """x f32 [..., in] as a weight of a GGML type meets it: the same shape, f32.

    in has to be a multiple of the numbers in a block of the type.
    """
    if type in _FLOATS:
        return x.to(_FLOATS[type]).float()
    rows = quantise(x.reshape(-1, x.shape[-1]), long=is_long(type))
    return (rows.integers * rows.scales.unsqueeze(-1)).view(x.shape)
