"""The integer products on a GPU, with the bits of `integer_linear_naive`: four weights and four
numbers of a row are multiplied by one instruction (dp4a).

A step takes 256 neighbouring weights of a row, 64 words of four integers. Most types keep two of
those in one word of the file, GAP words apart: such a pair is read once. Blocks stay as the file
has them; those whose size is not a multiple of four bytes are read in smaller parts.
"""

from __future__ import annotations

import struct

import torch
import triton.language as tl
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.linear.block_linear.with_triton import FEW_ROWS, expanded_product
from kernels.linear.block_parts import IQ4_LEVELS, LONG, MXFP4_LEVELS, SHORT, is_long
from kernels.triton_setup import INTERPRETED, as_rows, cdiv, jit, power_of_2

MAX_ROWS = 8
"""Rows of x in one program: each such group reads the weights once."""
LEAST_PROGRAMS = 2048
"""Programs of one warp that keep a GPU busy; where there are more, each takes several rows of
weights."""
MOST_COLUMNS = 8
GAPS = {"Q8_0": 8, "Q2_K": 8, "Q3_K": 8, "Q4_K": 8, "Q5_K": 8, "Q6_K": 16}
"""Words between the two of a pair; 4 in other types."""
WORDS_OF_GROUP = {"Q4_K": 8, "Q5_K": 8, "IQ4_XS": 8}
"""Words that share a scale in long blocks; 4 in other types."""
MINIMUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")

_ROUND = tl.constexpr(1.5 * 2**23)
"""A number this large has no digits after the point: adding it rounds, ties to even."""
_MAGNITUDE = tl.constexpr(2**31 - 1)
_ASM = tl.constexpr(not INTERPRETED)
_IQ4 = [tl.constexpr(word) for word in struct.unpack("<4i", struct.pack("16b", *IQ4_LEVELS))]
_MXFP4 = [tl.constexpr(word) for word in struct.unpack("<4i", struct.pack("16b", *MXFP4_LEVELS))]
_IQ4_A, _IQ4_B, _IQ4_C, _IQ4_D = _IQ4
_MXFP4_A, _MXFP4_B, _MXFP4_C, _MXFP4_D = _MXFP4


@jit
def _quantise(
    x, integers, scales, sums, n_in, x_stride, n_blocks,
    SIDE: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Blocks of SIDE numbers of a row, BLOCKS at once. sums: int32 of every PART numbers; with PART
    0 f32 of each block, times its scale."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < n_blocks
    at = block[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    values = tl.load(x + row * x_stride + at, inside[:, None], 0.0).to(tl.float32)
    # by the bits, among which NaN's are the largest
    bits = values.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    most = tl.full((BLOCKS,), 127.0, tl.float32)
    factor = tl.div_rn(most, largest)
    steps = values * factor[:, None]
    steps = tl.where(tl.abs(steps) < float("inf"), steps, 0.0)
    whole = ((steps + _ROUND) - _ROUND).to(tl.int32)
    tl.store(integers + row * n_in + at, whole.to(tl.int8), inside[:, None])
    if PART > 0:
        scale = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), factor)
        parts = tl.sum(tl.reshape(whole, (BLOCKS, SIDE // PART, PART)), 2)
        part = block[:, None] * (SIDE // PART) + tl.arange(0, SIDE // PART)[None, :]
        tl.store(sums + row * n_blocks * (SIDE // PART) + part, parts, inside[:, None])
    else:
        exact = tl.div_rn(largest, most)
        scale = exact.to(tl.float16).to(tl.float32)
        total = (exact * tl.sum(whole, 1).to(tl.float32)).to(tl.float16).to(tl.float32)
        tl.store(sums + row * n_blocks + block, total, inside)
    tl.store(scales + row * n_blocks + block, scale, inside)


@jit
def _dp4a(a, b):
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
def _word(address, inside, ALIGNED: tl.constexpr):
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
def _byte(address, inside):
    return tl.load(address, inside, 0).to(tl.int32)


@jit
def _half(address, inside):
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
def _digits_of_short(block, i, inside, TYPE: tl.constexpr):
    """Words i and i + 4 of a block of 32; of Q8_0 word i, and the other is of no use."""
    if TYPE == "Q8_0":
        first = _word(block + 2 + i * 4, inside, 2)
        second = first
    else:
        if TYPE == "Q4_0" or TYPE == "IQ4_NL":
            word = _word(block + 2 + i * 4, inside, 2)
        elif TYPE == "Q4_1":
            word = _word(block + 4 + i * 4, inside, 4)
        elif TYPE == "Q5_0":
            word = _word(block + 6 + i * 4, inside, 2)
        elif TYPE == "Q5_1":
            word = _word(block + 8 + i * 4, inside, 4)
        else:
            word = _word(block + 1 + i * 4, inside, 1)
        first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        if TYPE == "IQ4_NL" or TYPE == "MXFP4":
            first, second = _levels(first, TYPE), _levels(second, TYPE)
        elif TYPE == "Q4_0":
            first, second = _less(first, 8), _less(second, 8)
        elif TYPE == "Q5_0" or TYPE == "Q5_1":
            if TYPE == "Q5_0":
                fifth = _word(block + 2, inside, 2)
            else:
                fifth = _word(block + 4, inside, 4)
            first |= _of_fifth(fifth >> (4 * i))
            second |= _of_fifth(fifth >> (4 * i + 16))
            if TYPE == "Q5_0":
                first, second = _less(first, 16), _less(second, 16)
    return first, second


@jit
def _scale_of_short(block, inside, TYPE: tl.constexpr):
    if TYPE == "MXFP4":
        # half of 2^(e - 127); the two least are below the normal numbers
        e = _byte(block, inside)
        bits = tl.where(e > 1, (e - 1) << 23, 0x00200000 << e)
        scale = tl.where(inside, bits, 0).to(tl.float32, bitcast=True)
    else:
        scale = _half(block, inside)
    return scale


@jit
def _digits_of_long(block, p, inside, TYPE: tl.constexpr):
    """A pair of words of a block of 256, p: 0 .. 31."""
    if TYPE == "Q4_K":
        word = _word(block + 16 + p * 4, inside, 4)
        first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    elif TYPE == "Q5_K":
        word = _word(block + 48 + p * 4, inside, 4)
        fifth = _word(block + 16 + p % 8 * 4, inside, 4) >> (p // 8 * 2)
        first = (word & 0x0F0F0F0F) | ((fifth & 0x01010101) << 4)
        second = ((word >> 4) & 0x0F0F0F0F) | (((fifth >> 1) & 0x01010101) << 4)
    elif TYPE == "Q6_K":
        word = _word(block + p * 4, inside, 2)
        high = _word(block + 128 + p // 16 * 32 + p % 8 * 4, inside, 2) >> (p % 16 // 8 * 2)
        first = _less((word & 0x0F0F0F0F) | ((high & 0x03030303) << 4), 32)
        second = _less(((word >> 4) & 0x0F0F0F0F) | (((high >> 4) & 0x03030303) << 4), 32)
    elif TYPE == "IQ4_XS":
        word = _word(block + 8 + p * 4, inside, 4)
        first = _levels(word & 0x0F0F0F0F, TYPE)
        second = _levels((word >> 4) & 0x0F0F0F0F, TYPE)
    elif TYPE == "Q2_K":
        word = _word(block + 16 + p // 16 * 32 + p % 8 * 4, inside, 4) >> (p // 8 % 2 * 4)
        first, second = word & 0x03030303, (word >> 2) & 0x03030303
    else:
        word = _word(block + 32 + p // 16 * 32 + p % 8 * 4, inside, 2) >> (p // 8 % 2 * 4)
        third = _word(block + p % 8 * 4, inside, 2) >> (p // 8 * 2)
        first = _less((word & 0x03030303) | ((third & 0x01010101) << 2), 4)
        second = _less(((word >> 2) & 0x03030303) | (((third >> 1) & 0x01010101) << 2), 4)
    return first, second


@jit
def _scales_of_long(block, group, inside, TYPE: tl.constexpr):
    """Scale and minimum of a group of a block, int32."""
    minimum = group & 0
    if TYPE == "Q4_K" or TYPE == "Q5_K":
        r = group % 4
        low, offset = _byte(block + 4 + r, inside), _byte(block + 8 + r, inside)
        rest = _byte(block + 12 + r, inside)
        scale = tl.where(group < 4, low & 63, (rest & 15) | (low >> 6 << 4))
        minimum = tl.where(group < 4, offset & 63, (rest >> 4) | (offset >> 6 << 4))
    elif TYPE == "Q6_K":
        scale = (_byte(block + 192 + group, inside) << 24) >> 24
    elif TYPE == "IQ4_XS":
        low = _byte(block + 4 + group // 2, inside) >> (group % 2 * 4)
        scale = (
            (low & 15) | (((_byte(block + 2 + group // 4, inside) >> (group % 4 * 2)) & 3) << 4)
        ) - 32
    elif TYPE == "Q2_K":
        both = _byte(block + group, inside)
        scale, minimum = both & 15, both >> 4
    else:
        low = _byte(block + 96 + group % 8, inside) >> (group // 8 * 4)
        scale = (
            (low & 15) | (((_byte(block + 104 + group % 4, inside) >> (group // 4 * 2)) & 3) << 4)
        ) - 32
    return scale, minimum


@jit
def _sum_of_pairs(t, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr):
    first, second = tl.split(tl.reshape(t, (BM, BN, N, 2)))
    return first + second


@jit
def _product(
    blocks, x, scales, sums, y, n_rows, n_out, row_bytes, n_in, n_stretches,
    TYPE: tl.constexpr, IS_LONG: tl.constexpr, HAS_MINIMUMS: tl.constexpr, SIZE: tl.constexpr,
    GAP: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, PAIRED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN columns of results for BM rows. x: words of integers. TOGETHER: of the words of pairs that
    have a scale in common, or of a block."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    PARTS: tl.constexpr = (32 if PAIRED else 64) // TOGETHER
    part = tl.arange(0, PARTS)
    p = part[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    row = blocks + n.to(tl.int64) * row_bytes
    in_rows, in_columns = m < n_rows, n < n_out
    m = m.to(tl.int64)
    first_at = p // GAP * (2 * GAP) + p % GAP if PAIRED else p
    words = x + m[:, None, None] * (n_in // 4) + first_at[None]
    total = tl.zeros((BM, BN), tl.float32)
    for s in range(n_stretches):
        if IS_LONG:
            block = row + s * SIZE
            digits, other = _digits_of_long(
                block[:, None, None], p[None], in_columns[:, None, None], TYPE
            )
            some = in_rows[:, None, None]
            a = _dp4a(digits[None], tl.load(words + s * 64, some, 0)[:, None])
            b = _dp4a(other[None], tl.load(words + s * 64 + GAP, some, 0)[:, None])
            start = part * TOGETHER
            start = start // GAP * (2 * GAP) + start % GAP
            group, next_group = start // GROUP, (start + GAP) // GROUP
            inside = in_columns[:, None]
            scale, low = _scales_of_long(block[:, None], group[None], inside, TYPE)
            next_scale, next_low = _scales_of_long(block[:, None], next_group[None], inside, TYPE)
            exact = tl.sum(a, 3) * scale[None] + tl.sum(b, 3) * next_scale[None]
            d_row = tl.load(scales + m * n_stretches + s, in_rows, 0.0)
            if TYPE == "Q6_K":
                d = _half(block + 208, in_columns)
            elif TYPE == "Q3_K":
                d = _half(block + 108, in_columns)
            elif TYPE == "Q2_K":
                d = _half(block + 80, in_columns)
            else:
                d = _half(block, in_columns)
            t = tl.sum(exact, 2).to(tl.float32) * (d[None] * d_row[:, None])
            if HAS_MINIMUMS:
                of_groups = sums + (m[:, None] * n_stretches + s) * (64 // GROUP)
                sum_a = tl.load(of_groups + group[None], in_rows[:, None], 0)
                sum_b = tl.load(of_groups + next_group[None], in_rows[:, None], 0)
                less = tl.sum(sum_a[:, None] * low[None] + sum_b[:, None] * next_low[None], 2)
                d_min = _half(block + (82 if TYPE == "Q2_K" else 2), in_columns)
                t -= less.to(tl.float32) * (d_min[None] * d_row[:, None])
        else:
            number = s * 8 + part
            within = number < n_in // 32
            block = row[:, None] + number[None] * SIZE
            inside = in_columns[:, None] & within[None]
            some = in_rows[:, None, None] & within[None, :, None]
            digits, other = _digits_of_short(
                block[:, :, None], tl.arange(0, TOGETHER)[None, None], inside[:, :, None], TYPE
            )
            dots = _dp4a(digits[None], tl.load(words + s * 64, some, 0)[:, None])
            if PAIRED:
                dots += _dp4a(other[None], tl.load(words + s * 64 + GAP, some, 0)[:, None])
            of_rows = m[:, None] * (n_in // 32) + number[None]
            some_blocks = in_rows[:, None] & within[None]
            d_row = tl.load(scales + of_rows, some_blocks, 0.0)
            d = _scale_of_short(block, inside, TYPE)
            t = tl.sum(dots, 3).to(tl.float32) * (d[None] * d_row[:, None])
            if HAS_MINIMUMS:
                sum_row = tl.load(sums + of_rows, some_blocks, 0.0)
                least = tl.broadcast_to(_half(block + 2, inside)[None], (BM, BN, 8))
                t = tl.fma(least, tl.broadcast_to(sum_row[:, None], (BM, BN, 8)), t)
            t = _sum_of_pairs(t, BM, BN, 4)
            t = _sum_of_pairs(t, BM, BN, 2)
            first, second = tl.split(t)
            t = first + second
        total += t
    address = y + m[:, None] * n_out + n[None]
    tl.store(address, total, in_rows[:, None] & in_columns[None])


def integer_linear(
    x: torch.Tensor, blocks: torch.Tensor, type: str, *, invariant: bool = False
) -> torch.Tensor:
    """See kernels.linear.integer_blocks.integer_linear."""
    n_out, row_bytes = blocks.shape
    rows = as_rows(x)
    n_rows, n_in = rows.shape
    if n_rows > FEW_ROWS and not invariant:
        y = expanded_product(rows, blocks, type, torch.bfloat16)
        return y.view(*x.shape[:-1], n_out)
    long, group = is_long(type), WORDS_OF_GROUP.get(type, 4)
    side, part = (LONG, 4 * group) if long else (SHORT, 0)
    n_blocks = n_in // side
    integers = torch.empty(n_rows, n_in, dtype=torch.int8, device=x.device)
    scales = torch.empty(n_rows, n_blocks, device=x.device)
    n_sums, of_sums = (n_blocks * side // part, torch.int32) if long else (n_blocks, torch.float32)
    sums = torch.empty(n_rows, n_sums, dtype=of_sums, device=x.device)
    together = 4 if long else 16
    _quantise[(n_rows, cdiv(n_blocks, together))](
        rows, integers, scales, sums, n_in, rows.stride(0), n_blocks,
        SIDE=side, BLOCKS=together, PART=part, num_warps=4,
    )  # fmt: skip
    y = torch.empty(n_rows, n_out, device=x.device)
    rows_of, columns = tile_sides(n_rows, n_out)
    gap, is_paired = GAPS.get(type, 4), type != "Q8_0"
    _product[(cdiv(n_out, columns), cdiv(n_rows, rows_of))](
        blocks, integers.view(torch.int32), scales, sums, y, n_rows, n_out, row_bytes, n_in,
        cdiv(n_in, LONG),
        TYPE=type, IS_LONG=long, HAS_MINIMUMS=type in MINIMUMS,
        SIZE=GGML_QUANT_SIZES[GGMLQuantizationType[type]][1], GAP=gap, GROUP=group,
        TOGETHER=min(gap, group) if long else 4 if is_paired else 8, PAIRED=is_paired,
        BM=rows_of, BN=columns, num_warps=1,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n_out)


def tile_sides(n_rows: int, n_out: int) -> tuple[int, int]:
    """Rows of x and of weights in a program: neither changes a bit."""
    side = min(power_of_2(n_rows), MAX_ROWS)
    columns = max(1, min(MOST_COLUMNS // side, power_of_2(n_out // LEAST_PROGRAMS + 1)))
    return side, columns
