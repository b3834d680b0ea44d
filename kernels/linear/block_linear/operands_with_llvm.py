"""Weights decoded from their blocks into the operands of a product: float32 or bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.linear import decode_with_llvm
from kernels.llvm import F32X16, Code, Value, vector
from kernels.llvm.values import BF16
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
