"""The weights of one GGUF block in vectors of 16, float32 bits as gguf-py gives."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.llvm import Code, Value, vector
from kernels.llvm.values import F16, F32, I8, I8X16, I16, I32

BYTES64, BYTES32, BYTES8 = (vector(I8, count) for count in (64, 32, 8))
LANES = 16


HALVES = "F16", "BF16"
"""Numbers without blocks, which are taken 32 at a time."""


@functools.cache
def sizes(type: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if type in HALVES:
        return 2 * LANES, 4 * LANES
    elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return elements, n_bytes


def decode(code: Code, type: str, block: Value) -> Iterator[Value]:
    """The vectors f32 [16] of the block at an address, in the order of its elements."""
    return DECODERS[type](code, block)


def _half(code: Code, address: Value, count: int = LANES) -> Value:
    """The float16 at an address as a vector full of it."""
    return code.splat(code.load(address, F16), count).widen()


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


class Numbers:
    """Some f32 in memory, from where one of them fills a vector without an instruction."""

    def __init__(self, code: Code, numbers: Value) -> None:
        self._code = code
        self._start = code.stack(4 * numbers.type.count)
        code.store(numbers, self._start)

    def __getitem__(self, index: int) -> Value:
        return self._code.splat(self._code.load(self._start + 4 * index, F32))


def k_scales(code: Code, block: Value) -> tuple[Value, Value]:
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
    """Pairs of groups of 32, the first in the low halves of 32 bytes; 64 bytes at a time."""
    scales, offsets = (Numbers(code, numbers) for numbers in k_scales(code, block))
    for half in range(2):
        both = code.load(block + (16 + 64 * half), BYTES64)
        yield from _pairs(both & 15, both >> 4, scales, offsets, 4 * half)


def _q5_k(code: Code, block: Value) -> Iterator[Value]:
    """As Q4_K, with the fifth bits of group r in bit r of 32 bytes of their own."""
    scales, offsets = (Numbers(code, numbers) for numbers in k_scales(code, block))
    fifth = code.load(block + 16, BYTES32)

    def bits(group: int) -> Value:
        one, other = (((fifth >> r) & 1) << 4 for r in (group, group + 2))
        return one.beside(other)

    for half in range(2):
        both = code.load(block + (48 + 64 * half), BYTES64)
        first, second = (both & 15) | bits(4 * half), (both >> 4) | bits(4 * half + 1)
        yield from _pairs(first, second, scales, offsets, 4 * half)


def _pairs(
    even: Value, odd: Value, scales: Numbers, offsets: Numbers, group: int
) -> Iterator[Value]:
    """Four groups from `group` on: of its bytes one half holds the first and third of them."""
    for r, (bits, start) in enumerate(((even, 0), (odd, 0), (even, 32), (odd, 32))):
        scale, offset = scales[group + r], offsets[group + r]
        for part in (bits.part(start, LANES), bits.part(start + LANES, LANES)):
            yield part.to_float(signed=False) * scale - offset


def _q6_k(code: Code, block: Value) -> Iterator[Value]:
    """Halves of 128 elements; in each the groups 0 and 2, 1 and 3 share bytes of four bits, and
    all four share bytes of two bits. One scale for 16 elements."""
    numbers = code.load(block + 192, I8X16).to_float(signed=True) * _half(code, block + 208)
    scales = Numbers(code, numbers)
    for half in range(2):
        low = code.load(block + 64 * half, BYTES64)
        high = code.load(block + (128 + 32 * half), BYTES32)
        # two groups in 64 bytes
        tops = [(high << 4).beside(high << 2) & 0x30, high.beside(high >> 2) & 0x30]
        for i, bits in enumerate(((low & 15) | tops[0], (low >> 4) | tops[1])):
            integers = bits - 32
            for j in range(4):
                weights = integers.part(LANES * j, LANES).to_float(signed=True)
                yield weights * scales[8 * half + 4 * i + j]


def _f16(code: Code, block: Value) -> Iterator[Value]:
    for start in (0, LANES):
        yield code.load(block + 2 * start, vector(F16, LANES)).widen()


def _bf16(code: Code, block: Value) -> Iterator[Value]:
    """The upper halves of f32."""
    for start in (0, LANES):
        halves = code.load(block + 2 * start, vector(I16, LANES))
        yield (halves.extended(I32) << 16).bits(vector(F32, LANES))


DECODERS = {
    **{"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{"F16": _f16, "BF16": _bf16},
}
