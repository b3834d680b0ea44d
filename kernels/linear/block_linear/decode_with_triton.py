"""Two neighbouring weights of a row out of its GGUF blocks, as float32, bits as gguf-py gives.

All formats fall into groups of 32 elements, of which pair p holds the elements 2p and 2p + 1.
`row` points at 16-bit words, because blocks begin on even addresses and no more than that; j is
the group within the row, p the pair within the group. Words that several pairs or groups share
are loaded once for each: they come from the cache.
"""

from __future__ import annotations

import triton.language as tl

from kernels.triton_setup import jit


@jit
def _word(address, inside):
    return tl.load(address, inside, 0).to(tl.int32)


@jit
def _half(address, inside):
    """The float16 at a word."""
    return tl.load(address, inside, 0).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _byte(row, index, inside):
    return (_word(row + index // 2, inside) >> (index % 2 * 8)) & 255


@jit
def _q8_0(row, j, p, inside):
    block = row + j * 17
    scale = _half(block, inside)
    word = _word(block + 1 + p, inside)
    return ((word << 24) >> 24).to(tl.float32) * scale, (word >> 8).to(tl.float32) * scale


@jit
def _q4_0(row, j, p, inside):
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    block = row + j * 9
    scale = _half(block, inside)
    word = _word(block + 1 + p % 8, inside) >> (p // 8 * 4)
    even, odd = (word & 15) - 8, ((word >> 8) & 15) - 8
    return even.to(tl.float32) * scale, odd.to(tl.float32) * scale


@jit
def _k_scales(block, r, inside):
    """Scale and offset of group r of a Q4_K or Q5_K block: 6 bits each in bytes 4 to 15.

    The first four groups have theirs in the low bits of a byte each; the others in half a byte of
    the last four bytes and the two bits that the first ones leave.
    """
    first = _byte(block, 4 + r % 4, inside)
    second = _byte(block, 8 + r % 4, inside)
    third = _byte(block, 12 + r % 4, inside)
    scale = tl.where(r < 4, first & 63, (third & 15) | (first >> 6 << 4))
    offset = tl.where(r < 4, second & 63, (third >> 4) | (second >> 6 << 4))
    scale = scale.to(tl.float32) * _half(block, inside)
    return scale, offset.to(tl.float32) * _half(block + 1, inside)


@jit
def _q4_k(row, j, p, inside):
    block, r = row + j // 8 * 72, j % 8
    scale, offset = _k_scales(block, r, inside)
    word = _word(block + 8 + r // 2 * 16 + p, inside) >> (r % 2 * 4)
    even, odd = word & 15, (word >> 8) & 15
    return even.to(tl.float32) * scale - offset, odd.to(tl.float32) * scale - offset


@jit
def _q5_k(row, j, p, inside):
    """As Q4_K, with the fifth bits of group r in bit r of 32 bytes of their own."""
    block, r = row + j // 8 * 88, j % 8
    scale, offset = _k_scales(block, r, inside)
    word = _word(block + 24 + r // 2 * 16 + p, inside) >> (r % 2 * 4)
    fifth = _word(block + 8 + p, inside) >> r
    even = (word & 15) | ((fifth & 1) << 4)
    odd = ((word >> 8) & 15) | (((fifth >> 8) & 1) << 4)
    return even.to(tl.float32) * scale - offset, odd.to(tl.float32) * scale - offset


@jit
def _q6_k(row, j, p, inside):
    """Halves of 128 elements; in each the groups 0 and 2, 1 and 3 share bytes of four bits, and
    all four share bytes of two bits. One scale for 16 elements."""
    block, half, t = row + j // 8 * 105, j % 8 // 4, j % 4
    word = _word(block + half * 32 + t % 2 * 16 + p, inside) >> (t // 2 * 4)
    high = _word(block + 64 + half * 16 + p, inside) >> (t * 2)
    scale = (_byte(block, 192 + half * 8 + t * 2 + p // 8, inside) << 24) >> 24
    scale = _half(block + 104, inside) * scale.to(tl.float32)
    even = ((word & 15) | ((high & 3) << 4)) - 32
    odd = (((word >> 8) & 15) | (((high >> 8) & 3) << 4)) - 32
    return even.to(tl.float32) * scale, odd.to(tl.float32) * scale


@jit
def decode(row, j, p, inside, TYPE: tl.constexpr):
    if TYPE == "Q8_0":
        even, odd = _q8_0(row, j, p, inside)
    elif TYPE == "Q4_0":
        even, odd = _q4_0(row, j, p, inside)
    elif TYPE == "Q4_K":
        even, odd = _q4_k(row, j, p, inside)
    elif TYPE == "Q5_K":
        even, odd = _q5_k(row, j, p, inside)
    else:
        even, odd = _q6_k(row, j, p, inside)
    return even, odd
