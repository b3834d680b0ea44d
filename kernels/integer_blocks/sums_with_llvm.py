"""Products of small integers, and sums over the elements of several vectors at once."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.llvm import Code, Value, vector
from kernels.llvm.values import I16, I32

_I16X16, _I32X8 = vector(I16, 16), vector(I32, 8)


def pair_sums(code: Code, words: Value, factors: Value) -> Value:
    """i16 [16] times i16 [16], neighbours added: i32 [8]."""
    return code.call("llvm.x86.avx2.pmadd.wd", _I32X8, words, factors)


def byte_pair_sums(code: Code, unsigned: Value, signed: Value) -> Value:
    """i8 [32] times i8 [32], the first without a sign, neighbours added: i16 [16].

    Exact as long as the unsigned ones do not exceed 128.
    """
    return code.call("llvm.x86.avx2.pmadd.ub.sw", _I16X16, unsigned, signed)


def add_pair_sums(code: Code, total: Value, words: Value, factors: Value, *, vnni: bool) -> Value:
    """total i32 [8], plus pair_sums."""
    if vnni:
        return code.call("llvm.x86.avx512.vpdpwssd.256", _I32X8, total, words, factors)
    return total + pair_sums(code, words, factors)


def add_byte_sums(code: Code, total: Value, unsigned: Value, signed: Value) -> Value:
    """total i32 [8], plus in each place four products of bytes; with VNNI only."""
    return code.call("llvm.x86.avx512.vpdpbusd.256", _I32X8, total, unsigned, signed)


def sums(vectors: Sequence[Value]) -> Value:
    """The sum ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of each of 1, 2, 4 or 8 vectors i32 [8] or
    f32 [8], in a vector of so many."""
    count, parts = len(vectors), list(vectors)
    for _ in range(2):
        if len(parts) == 1:
            parts *= 2
        parts = [_neighbours(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    low, high = parts if count == 8 else (parts[0], parts[0])
    together = low.take([0, 1, 2, 3, 8, 9, 10, 11], high)
    result = together + low.take([4, 5, 6, 7, 12, 13, 14, 15], high)
    return result if count == 8 else result.part(0, count)


def _neighbours(a: Value, b: Value) -> Value:
    """Neighbours added: of each 128 bits those of a, then those of b."""
    even = a.take([0, 2, 8, 10, 4, 6, 12, 14], b)
    return even + a.take([1, 3, 9, 11, 5, 7, 13, 15], b)
