"""Digits and scales of GGUF blocks on a GPU, as words of four signed bytes, and the product of two
such words (dp4a)."""

from __future__ import annotations

import struct

import triton.language as tl

from kernels.linear.block_parts import IQ4_LEVELS, MXFP4_LEVELS
from kernels.triton_setup import INTERPRETED, jit

_ASM = tl.constexpr(not INTERPRETED)
_IQ4 = [tl.constexpr(word) for word in struct.unpack("<4i", struct.pack("16b", *IQ4_LEVELS))]
_MXFP4 = [tl.constexpr(word) for word in struct.unpack("<4i", struct.pack("16b", *MXFP4_LEVELS))]
_IQ4_A, _IQ4_B, _IQ4_C, _IQ4_D = _IQ4
_MXFP4_A, _MXFP4_B, _MXFP4_C, _MXFP4_D = _MXFP4


@jit
def dp4a(a, b):
    """The sum of the products of four signed bytes of a with those of b, int32."""
    if _ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        total = (a >> 24) * (b >> 24)
        for i in tl.static_range(3):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return total


@jit
def _permuted(a, b, choice):
    """Of the eight bytes of a and b those that four digits 0 .. 7 of four bits each choose."""
    if _ASM:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, choice],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = choice & 0
        for i in tl.static_range(4):
            digit = (choice >> (4 * i)) & 7
            word |= ((tl.where(digit < 4, a, b) >> (digit % 4 * 8)) & 255) << (8 * i)
    return word


@jit
def word_at(address, inside, ALIGNED: tl.constexpr):
    """The word of four bytes at an address of bytes, which ALIGNED divides."""
    if ALIGNED == 4:
        word = tl.load(address.to(tl.pointer_type(tl.int32)), inside, 0)
    elif ALIGNED == 2:
        halves = address.to(tl.pointer_type(tl.uint16))
        word = tl.load(halves, inside, 0).to(tl.int32)
        word |= tl.load(halves + 1, inside, 0).to(tl.int32) << 16
    else:
        word = tl.load(address, inside, 0).to(tl.int32)
        for i in tl.static_range(1, 4):
            word |= tl.load(address + i, inside, 0).to(tl.int32) << (8 * i)
    return word


@jit
def byte_at(address, inside):
    return tl.load(address, inside, 0).to(tl.int32)


@jit
def half_at(address, inside):
    """The float16 at an even address of bytes."""
    return tl.load(address.to(tl.pointer_type(tl.float16)), inside, 0.0).to(tl.float32)


@jit
def _less(word, N: tl.constexpr):
    """Every byte, 0 .. 63, less N, 1 .. 64, as signed bytes."""
    # the highest bit lends to its own byte alone, and is turned back
    return ((word | -2139062144) - N * 0x01010101) ^ -2139062144


@jit
def _levels(word, TYPE: tl.constexpr):
    """The bytes that the digits 0 .. 15 in the bytes of a word stand for."""
    choice = (word & 7) | ((word >> 4) & 0x70) | ((word >> 8) & 0x700) | ((word >> 12) & 0x7000)
    zero = word & 0
    if TYPE == "MXFP4":
        low = _permuted(zero + _MXFP4_A, zero + _MXFP4_B, choice)
        high = _permuted(zero + _MXFP4_C, zero + _MXFP4_D, choice)
    else:
        low = _permuted(zero + _IQ4_A, zero + _IQ4_B, choice)
        high = _permuted(zero + _IQ4_C, zero + _IQ4_D, choice)
    is_high = ((word >> 3) & 0x01010101) * 255
    return (high & is_high) | (low & ~is_high)


@jit
def _of_fifth(bits):
    """Bits 0 .. 3 as bit 4 of four bytes."""
    return ((bits & 1) << 4) | ((bits & 2) << 11) | ((bits & 4) << 18) | ((bits & 8) << 25)


@jit
def digits_of_short(block, i, inside, TYPE: tl.constexpr):
    """Words i and i + 4 of a block of 32; of Q8_0 word i, and the other is of no use."""
    if TYPE == "Q8_0":
        first = word_at(block + 2 + i * 4, inside, 2)
        second = first
    else:
        if TYPE == "Q4_0" or TYPE == "IQ4_NL":
            word = word_at(block + 2 + i * 4, inside, 2)
        elif TYPE == "Q4_1":
            word = word_at(block + 4 + i * 4, inside, 4)
        elif TYPE == "Q5_0":
            word = word_at(block + 6 + i * 4, inside, 2)
        elif TYPE == "Q5_1":
            word = word_at(block + 8 + i * 4, inside, 4)
        else:
            word = word_at(block + 1 + i * 4, inside, 1)
        first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        if TYPE == "IQ4_NL" or TYPE == "MXFP4":
            first, second = _levels(first, TYPE), _levels(second, TYPE)
        elif TYPE == "Q4_0":
            first, second = _less(first, 8), _less(second, 8)
        elif TYPE == "Q5_0" or TYPE == "Q5_1":
            if TYPE == "Q5_0":
                fifth = word_at(block + 2, inside, 2)
            else:
                fifth = word_at(block + 4, inside, 4)
            first |= _of_fifth(fifth >> (4 * i))
            second |= _of_fifth(fifth >> (4 * i + 16))
            if TYPE == "Q5_0":
                first, second = _less(first, 16), _less(second, 16)
    return first, second


@jit
def scale_of_short(block, inside, TYPE: tl.constexpr):
    if TYPE == "MXFP4":
        # half of 2^(e - 127); the two least are below the normal numbers
        e = byte_at(block, inside)
        bits = tl.where(e > 1, (e - 1) << 23, 0x00200000 << e)
        scale = tl.where(inside, bits, 0).to(tl.float32, bitcast=True)
    else:
        scale = half_at(block, inside)
    return scale


@jit
def digits_of_long(block, p, inside, TYPE: tl.constexpr):
    """A pair of words of a block of 256, p: 0 .. 31."""
    if TYPE == "Q4_K":
        word = word_at(block + 16 + p * 4, inside, 4)
        first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    elif TYPE == "Q5_K":
        word = word_at(block + 48 + p * 4, inside, 4)
        fifth = word_at(block + 16 + p % 8 * 4, inside, 4) >> (p // 8 * 2)
        first = (word & 0x0F0F0F0F) | ((fifth & 0x01010101) << 4)
        second = ((word >> 4) & 0x0F0F0F0F) | (((fifth >> 1) & 0x01010101) << 4)
    elif TYPE == "Q6_K":
        word = word_at(block + p * 4, inside, 2)
        high = word_at(block + 128 + p // 16 * 32 + p % 8 * 4, inside, 2) >> (p % 16 // 8 * 2)
        first = _less((word & 0x0F0F0F0F) | ((high & 0x03030303) << 4), 32)
        second = _less(((word >> 4) & 0x0F0F0F0F) | (((high >> 4) & 0x03030303) << 4), 32)
    elif TYPE == "IQ4_XS":
        word = word_at(block + 8 + p * 4, inside, 4)
        first = _levels(word & 0x0F0F0F0F, TYPE)
        second = _levels((word >> 4) & 0x0F0F0F0F, TYPE)
    elif TYPE == "Q2_K":
        word = word_at(block + 16 + p // 16 * 32 + p % 8 * 4, inside, 4) >> (p // 8 % 2 * 4)
        first, second = word & 0x03030303, (word >> 2) & 0x03030303
    else:
        word = word_at(block + 32 + p // 16 * 32 + p % 8 * 4, inside, 2) >> (p // 8 % 2 * 4)
        third = word_at(block + p % 8 * 4, inside, 2) >> (p // 8 * 2)
        first = _less((word & 0x03030303) | ((third & 0x01010101) << 2), 4)
        second = _less(((word >> 2) & 0x03030303) | (((third >> 1) & 0x01010101) << 2), 4)
    return first, second


@jit
def scales_of_long(block, group, inside, TYPE: tl.constexpr):
    """Scale and minimum of a group of a block, int32."""
    minimum = group & 0
    if TYPE == "Q4_K" or TYPE == "Q5_K":
        r = group % 4
        low, offset = byte_at(block + 4 + r, inside), byte_at(block + 8 + r, inside)
        rest = byte_at(block + 12 + r, inside)
        scale = tl.where(group < 4, low & 63, (rest & 15) | (low >> 6 << 4))
        minimum = tl.where(group < 4, offset & 63, (rest >> 4) | (offset >> 6 << 4))
    elif TYPE == "Q6_K":
        scale = (byte_at(block + 192 + group, inside) << 24) >> 24
    elif TYPE == "IQ4_XS":
        low = byte_at(block + 4 + group // 2, inside) >> (group % 2 * 4)
        scale = (
            (low & 15) | (((byte_at(block + 2 + group // 4, inside) >> (group % 4 * 2)) & 3) << 4)
        ) - 32
    elif TYPE == "Q2_K":
        both = byte_at(block + group, inside)
        scale, minimum = both & 15, both >> 4
    else:
        low = byte_at(block + 96 + group % 8, inside) >> (group // 8 * 4)
        scale = (
            (low & 15) | (((byte_at(block + 104 + group % 4, inside) >> (group // 4 * 2)) & 3) << 4)
        ) - 32
    return scale, minimum
