"""Blocks as sums of terms: whole numbers, which bfloat16 holds exactly, times a scale each.

A product with rounded x then needs no rounding of the weights, and no arithmetic on them either:
their numbers come out of a table. Formats with offsets leave these to the sums of x over groups.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from kernels.linear.block_linear.operands_with_llvm import BF16X32
from kernels.linear.decode_with_llvm import Numbers, k_scales
from kernels.llvm import Code, Value, vector
from kernels.llvm.values import F16, I8, I16

GROUP = 32
"""Elements of a term, and of a sum of x."""

I16X32, I8X32 = vector(I16, GROUP), vector(I8, GROUP)

Terms = Iterator[tuple[Value, Value]]
"""Weights bf16 [32] and scales f32 [16], for pairs of them."""


def has_terms(type: str) -> bool:
    """Whether blocks of this GGML type can be written as such terms."""
    return type in _TERMS


def terms(code: Code, type: str, block: Value) -> tuple[Terms, Value | None]:
    """The terms of the block at an address in the order of its elements, and f32 offsets, one for
    each group, which the weights are less by."""
    return _TERMS[type](code, block)


def _words(code: Code, address: Value) -> Value:
    """32 bytes from memory, widened to 16 bits each."""
    return code.load(address, I8X32).resize(I16)


def _looked_up(code: Code, words: Value, integers: Sequence[int]) -> Value:
    """The integers, 32 of them, that the last 5 bits of the words point at, as bf16."""
    found = code.call("llvm.x86.avx512.permvar.hi.512", I16X32, _table(code, integers), words)
    return found.bits(BF16X32)


def _table(code: Code, integers: Sequence[int]) -> Value:
    bits = [struct.unpack("<I", struct.pack("<f", n))[0] >> 16 for n in integers]
    return code.constants(I16X32, bits)


def _q4_0(code: Code, block: Value) -> tuple[Terms, Value | None]:
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    pairs = code.load(block + 2, vector(I8, 16))
    words = pairs.beside(pairs >> 4).resize(I16)
    scale = code.splat(code.load(block, F16)).widen()
    return iter([(_looked_up(code, words, [*range(-8, 8)] * 2), scale)]), None


def _q4_k(code: Code, block: Value) -> tuple[Terms, Value | None]:
    scales, offsets = k_scales(code, block)

    def parts() -> Terms:
        kept, table = Numbers(code, scales), [*range(16)] * 2
        for pair in range(4):
            words = _words(code, block + (16 + 32 * pair))
            yield _looked_up(code, words, table), kept[2 * pair]
            yield _looked_up(code, words >> 4, table), kept[2 * pair + 1]

    return parts(), offsets


def _q5_k(code: Code, block: Value) -> tuple[Terms, Value | None]:
    """As Q4_K, with the fifth bits of group r in bit r of 32 bytes of their own."""
    scales, offsets = k_scales(code, block)

    def parts() -> Terms:
        kept = Numbers(code, scales)
        fifth = _words(code, block + 16) << 4
        for pair in range(4):
            words = _words(code, block + (48 + 32 * pair))
            for r, four in ((2 * pair, words), (2 * pair + 1, words >> 4)):
                index = (four & 15) | ((fifth >> r) & ~15)
                yield _looked_up(code, index, range(32)), kept[r]

    return parts(), offsets


def _q6_k(code: Code, block: Value) -> tuple[Terms, Value | None]:
    """Halves of 128 elements; in each the groups 0 and 2, 1 and 3 share bytes of four bits, and
    all four share bytes of two bits. One scale for 16 elements."""

    def parts() -> Terms:
        scales = code.load(block + 192, vector(I8, 16)).to_float(signed=True)
        scales = scales * code.splat(code.load(block + 208, F16)).widen()
        below, above = _table(code, range(-32, 0)), _table(code, range(32))
        for half in range(2):
            low = [_words(code, block + (64 * half + 32 * i)) for i in range(2)]
            high = _words(code, block + (128 + 32 * half)) << 4
            for t in range(4):
                # of the index the last 6 bits count
                index = ((low[t % 2] >> (t // 2 * 4)) & 15) | ((high >> (2 * t)) & ~15)
                name = "llvm.x86.avx512.vpermi2var.hi.512"
                found = code.call(name, I16X32, below, index, above)
                group = 4 * half + t
                yield found.bits(BF16X32), scales.take([2 * group] * 8 + [2 * group + 1] * 8)

    return parts(), None


_TERMS = {"Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
