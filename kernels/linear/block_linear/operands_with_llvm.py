"""Weights decoded from their blocks into the operands of a product: float32 or bfloat16."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.linear import decode_with_llvm
from kernels.linear.decode_with_llvm import Numbers, k_scales
from kernels.llvm import F32X16, Code, Value, vector
from kernels.llvm.values import BF16, F16, I8, I16
from kernels.processor import has_feature

BF16X32 = vector(BF16, 32)
PLAIN = "F32"
"""Numbers that are no blocks: 32 of them count as one."""


@dataclass(frozen=True, slots=True, eq=False)
class Arithmetic:
    """One of two ways to multiply: in float32, or rounded to bfloat16 and summed in float32.

    step: elements multiplied at once. size: bytes of an element as the product reads it. rounded:
    weights and inputs are rounded to bfloat16. fused: this processor multiplies pairs of bfloat16;
    otherwise rounded numbers are kept and multiplied in float32, which is exact.
    """

    rounded: bool
    fused: bool

    @property
    def step(self) -> int:
        return 32 if self.fused else 16

    @property
    def size(self) -> int:
        return 2 if self.fused else 4

    def operand(self, code: Code, low: Value, high: Value | None = None) -> Value:
        """`step` weights or inputs as the product takes them.

        low: the first 16, f32. high: the next 16, where step is 32.
        """
        if self.fused:
            assert high is not None
            # the type's own rounding would be compiled to three instructions
            return code.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16X32, high, low)
        return low.rounded_to_bf16() if self.rounded else low

    def load(self, code: Code, address: Value) -> Value:
        """The operand of `step` elements at an address."""
        return code.load(address, BF16X32 if self.fused else F32X16)

    def read(self, bits: Value) -> Value:
        """A vector of 64 bytes taken for an operand."""
        return bits.bits(BF16X32 if self.fused else F32X16)

    def add(self, code: Code, total: Value, a: Value, b: Value) -> Value:
        """total + a * b, f32 [16]. With `fused`, each sum takes the products of two neighbours."""
        if self.fused:
            return code.call("llvm.x86.avx512bf16.dpbf16ps.512", F32X16, total, a, b)
        return code.fma(a, b, total)


@functools.cache
def arithmetic(*, rounded: bool) -> Arithmetic:
    """The faster way on this processor. rounded: bfloat16 products are asked for."""
    return Arithmetic(rounded, rounded and has_feature("avx512bf16"))


def sizes(type: str) -> tuple[int, int]:
    """Elements and bytes of a block of this GGML type, or of PLAIN."""
    return (32, 128) if type == PLAIN else decode_with_llvm.sizes(type)


def operands(code: Code, type: str, block: Value, how: Arithmetic) -> Iterator[Value]:
    """Write code that decodes the block at an address; yields its weights, `how.step` at a time."""
    decoded = _plain(code, block) if type == PLAIN else decode_with_llvm.decode(code, type, block)
    if not how.fused:
        yield from (how.operand(code, weights) for weights in decoded)
        return
    for low in decoded:
        yield how.operand(code, low, next(decoded))


def _plain(code: Code, block: Value) -> Iterator[Value]:
    yield from (code.load(block + at, F32X16) for at in (0, 64))


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
                # only the last 6 bits of the index count
                index = ((low[t % 2] >> (t // 2 * 4)) & 15) | ((high >> (2 * t)) & ~15)
                name = "llvm.x86.avx512.vpermi2var.hi.512"
                found = code.call(name, I16X32, below, index, above)
                group = 4 * half + t
                yield found.bits(BF16X32), scales.take([2 * group] * 8 + [2 * group + 1] * 8)

    return parts(), None


_TERMS = {"Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
