"""Sums over the elements of several vectors at once, by shuffling and adding pairs of vectors."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.integer_blocks.integers_with_llvm import I16X16, I32X8
from kernels.llvm import Code, Value, vector
from kernels.llvm.values import F32, I32, I64

I64X4 = vector(I64, 4)
_WORD = 2**15 - 1


def pair_sums(code: Code, words: Value, factors: Value) -> Value:
    """i16 [16] times i16 [16], neighbours added: i32 [8]."""
    return code.call("llvm.x86.avx2.pmadd.wd", I32X8, words, factors)


def byte_pair_sums(code: Code, unsigned: Value, signed: Value) -> Value:
    """i8 [32] times i8 [32], the first without a sign, neighbours added: i16 [16].

    Exact as long as the unsigned ones do not exceed 128.
    """
    return code.call("llvm.x86.avx2.pmadd.ub.sw", I16X16, unsigned, signed)


def integer_sums(code: Code, vectors: Sequence[Value], most: int = _WORD) -> Value:
    """The sums of 8 vectors i32 [8] or i16 [16], i32 [8] in their order.

    most: the largest magnitude of an i16; they are added in 16 bits as long as that holds the sums.
    """
    parts = list(vectors)
    for level in range(3):
        if parts[0].type == I16X16 and most << (level + 1) > _WORD:
            parts = [_widened(code, part) for part in parts]
        parts = [_STEPS[level](a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0] if parts[0].type == I32X8 else _widened(code, parts[0])


def float_sums(vectors: Sequence[Value]) -> Value:
    """Of 4 vectors f32 [8] the sums ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), f32 [4]."""
    a, b, c, d = vectors
    parts = _neighbours(_neighbours(a, b), _neighbours(c, d))
    return parts.part(0, 4) + parts.part(4, 4)


def _widened(code: Code, words: Value) -> Value:
    return pair_sums(code, words, code.constant(I16X16, 1))


def _far(a: Value, b: Value) -> Value:
    """Halves of each 128 bits added: those of a, then those of b."""
    x, y = a.bits(I64X4), b.bits(I64X4)
    return x.take([0, 4, 2, 6], y).bits(a.type) + x.take([1, 5, 3, 7], y).bits(a.type)


def _neighbours(a: Value, b: Value) -> Value:
    """Neighbours of 32 bits added: of each 128 bits those of a, then those of b."""
    as_numbers = vector(F32 if a.type.element == F32 else I32, 8)
    x, y = a.bits(as_numbers), b.bits(as_numbers)
    even = x.take([0, 2, 8, 10, 4, 6, 12, 14], y)
    odd = x.take([1, 3, 9, 11, 5, 7, 13, 15], y)
    return even.bits(a.type) + odd.bits(a.type)


def _halves(a: Value, b: Value) -> Value:
    """Both halves added: those of a, then those of b."""
    x, y = a.bits(I64X4), b.bits(I64X4)
    return x.take([0, 1, 4, 5], y).bits(a.type) + x.take([2, 3, 6, 7], y).bits(a.type)


_STEPS = (_far, _neighbours, _halves)
