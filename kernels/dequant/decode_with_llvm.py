"""The weights of one GGUF block in vectors of 16, float32 bits as gguf-py gives."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.llvm import Code, Value, vector
from kernels.llvm.code import F16, I8, I8X16, I32

BYTES32, BYTES8 = vector(I8, 32), vector(I8, 8)
LANES = 16


@functools.cache
def sizes(type: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return elements, n_bytes


def decode(code: Code, type: str, block: Value) -> Iterator[Value]:
    """The vectors f32 [16] of the block at an address, in the order of its elements."""
    return DECODERS[type](code, block)


def _half(code: Code, address: Value, count: int = LANES) -> Value:
    """The float16 at an address as a vector full of it."""
    return code.splat(code.load(address, F16), count).widen()


def _split(x: Value) -> tuple[Value, Value]:
    return x.part(0, LANES), x.part(LANES, LANES)


def _q8_0(code: Code, block: Value) -> Iterator[Value]:
    scale = _half(code, block)
    for start in (0, LANES):
        yield code.load(block + (2 + start), I8X16).to_float(signed=True) * scale


def _q4_0(code: Code, block: Value) -> Iterator[Value]:
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    scale = _half(code, block)
    pairs = code.load(block + 2, I8X16)
    for nibbles in (pairs & 15, pairs >> 4):
        yield (nibbles - 8).to_float(signed=True) * scale


def _k_scales(code: Code, block: Value) -> tuple[Value, Value]:
    """Scales and offsets f32 [8] of a Q4_K or Q5_K block: 6 bits each in bytes 4 to 15.

    The first four have theirs in the low bits of a byte each; the others in half a byte of the
    last four bytes and the two bits that the first ones leave.
    """
    first, second, third = (code.load(block + at, I32) for at in (4, 8, 12))
    low, pair = 0x3F3F3F3F, 0x03030303

    def floats(four: Value, rest: Value, top: Value) -> Value:
        others = (rest & 0x0F0F0F0F) | (((top >> 6) & pair) << 4)
        words = code.splat(four, 1).beside(code.splat(others, 1))
        return words.bits(BYTES8).to_float(signed=False)

    scales = floats(first & low, third, first) * _half(code, block, 8)
    offsets = floats(second & low, third >> 4, second) * _half(code, block + 2, 8)
    return scales, offsets


def _q4_k(code: Code, block: Value) -> Iterator[Value]:
    scales, offsets = _k_scales(code, block)
    for pair in range(4):
        both = code.load(block + (16 + 32 * pair), BYTES32)
        for group, bits in ((2 * pair, both & 15), (2 * pair + 1, both >> 4)):
            yield from _scaled(bits, scales, offsets, group)


def _q5_k(code: Code, block: Value) -> Iterator[Value]:
    """As Q4_K, with the fifth bits of group r in bit r of 32 bytes of their own."""
    scales, offsets = _k_scales(code, block)
    fifth = code.load(block + 16, BYTES32)
    for pair in range(4):
        both = code.load(block + (48 + 32 * pair), BYTES32)
        for group, bits in ((2 * pair, both & 15), (2 * pair + 1, both >> 4)):
            yield from _scaled(bits | (((fifth >> group) & 1) << 4), scales, offsets, group)


def _scaled(bits: Value, scales: Value, offsets: Value, group: int) -> Iterator[Value]:
    scale, offset = scales.spread(group, LANES), offsets.spread(group, LANES)
    for part in _split(bits):
        yield part.to_float(signed=False) * scale - offset


def _q6_k(code: Code, block: Value) -> Iterator[Value]:
    """Halves of 128 elements; in each the groups 0 and 2, 1 and 3 share bytes of four bits, and
    all four share bytes of two bits. One scale for 16 elements."""
    scales = code.load(block + 192, I8X16).to_float(signed=True)
    scales = scales * _half(code, block + 208)
    for half in range(2):
        high = code.load(block + (128 + 32 * half), BYTES32)
        low = [code.load(block + (64 * half + 32 * i), BYTES32) for i in range(2)]
        for t in range(4):
            bits = (low[t % 2] >> (t // 2 * 4)) & 15
            bits = (bits | (((high >> (2 * t)) & 3) << 4)) - 32
            for i, part in enumerate(_split(bits)):
                yield part.to_float(signed=True) * scales.spread(8 * half + 2 * t + i, LANES)


DECODERS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
