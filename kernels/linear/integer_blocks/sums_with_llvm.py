"""Products of small integers, and sums over the elements of several vectors at once.

Vectors have 32 bytes, or 64 where the processor has AVX512: two of 32 that stand for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.llvm import Code, Value, vector
from kernels.llvm.values import I16, I32

_BITS = 256
_PAIRS = {_BITS: "llvm.x86.avx2.pmadd.wd", 2 * _BITS: "llvm.x86.avx512.pmaddw.d.512"}
_BYTE_PAIRS = {_BITS: "llvm.x86.avx2.pmadd.ub.sw", 2 * _BITS: "llvm.x86.avx512.pmaddubs.w.512"}


def pair_sums(code: Code, words: Value, factors: Value) -> Value:
    """i16 [16] times i16 [16], neighbours added: i32 [8]."""
    count = words.type.count
    return code.call(_PAIRS[16 * count], vector(I32, count // 2), words, factors)


def byte_pair_sums(code: Code, unsigned: Value, signed: Value) -> Value:
    """i8 [32] times i8 [32], the first without a sign, neighbours added: i16 [16].

    Exact as long as the unsigned ones do not exceed 128.
    """
    count = unsigned.type.count
    return code.call(_BYTE_PAIRS[8 * count], vector(I16, count // 2), unsigned, signed)


def add_byte_sums(code: Code, total: Value, unsigned: Value, signed: Value) -> Value:
    """total i32 [8], plus in each place four products of bytes; with VNNI only."""
    name = f"llvm.x86.avx512.vpdpbusd.{8 * unsigned.type.count}"
    return code.call(name, total.type, total, unsigned, signed)


def sums(vectors: Sequence[Value]) -> Value:
    """The sum ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of each eight elements of 1, 2, 4 or 8
    vectors of i32 or f32: those of the first eight of each vector, then those of the next."""
    count, parts = len(vectors), list(vectors)
    for _ in range(2):
        if len(parts) == 1:
            parts *= 2
        parts = [_neighbours(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    low, high = parts if count == 8 else (parts[0], parts[0])
    n, per_vector = low.type.count, min(count, 4)
    first = [
        start + side * n + i
        for start in range(0, n, 8)
        for side in range(count // per_vector)
        for i in range(per_vector)
    ]
    return low.take(first, high) + low.take([lane + 4 for lane in first], high)


def _neighbours(a: Value, b: Value) -> Value:
    """Neighbours added: of each four those of a, then those of b."""
    return a.take_in_fours([0, 2, 4, 6], b) + a.take_in_fours([1, 3, 5, 7], b)
