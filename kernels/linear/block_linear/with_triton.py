"""The product straight from GGUF blocks: each weight expanded in registers, read once.

A program forms BN columns of the result for up to 16 rows of x. Sums run in f32 over four
axes, one number for each pair of a tile, and are added up at the end.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kernels.linear.block_linear import TYPES, block_linear_with_torch
from kernels.linear.dequant import dequantise
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

GROUP = 32
MAX_ROWS = 16
COLUMNS = 4
FEW_ROWS = 64
"""Rows beyond which expanding a matrix first is faster, as measured on an H100."""
MOST_EXPANDED = 1 << 26


@jit
def _product(
    x, words, y, n_rows, n_out, n_groups, row_words, x_stride,
    TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = words + n.to(tl.int64)[:, None, None] * row_words
    p = tl.arange(0, 16)[None, None, :]
    total = tl.zeros((BM, BN, BG, 16), tl.float32)
    for start in range(0, n_groups, BG):
        j = (start + tl.arange(0, BG))[None, :, None]
        even, odd = decode(row, j, p, (n < n_out)[:, None, None] & (j < n_groups), TYPE)
        pairs = x + m[:, None, None, None] * x_stride + (j * 32 + p * 2)[None]
        inside = (m < n_rows)[:, None, None, None] & (j < n_groups)[None]
        total = tl.fma(tl.load(pairs, inside, 0.0).to(tl.float32), even[None], total)
        total = tl.fma(tl.load(pairs + 1, inside, 0.0).to(tl.float32), odd[None], total)
    result = tl.sum(tl.sum(total, 3), 2)
    address = y + m.to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(address, result, (m < n_rows)[:, None] & (n < n_out)[None, :])


def block_linear(
    x: Tensor, blocks: Tensor, type: str, *, rounded: bool = False, invariant: bool = False
) -> Tensor:
    if rounded and invariant:
        return block_linear_with_torch(x, blocks, type, rounded=True, invariant=True)
    n_out, n_in, rows = blocks.shape[0], x.shape[-1], as_rows(x)
    if rounded or (len(rows) > FEW_ROWS and not invariant):
        dtype = torch.bfloat16 if rounded else torch.float32
        return expanded_product(rows, blocks, type, dtype).view(*x.shape[:-1], n_out)
    words = blocks.view(torch.int16)
    y = torch.empty(rows.shape[0], n_out, dtype=torch.float32, device=x.device)
    # the shape of a tile decides in which order a row is summed
    side = MAX_ROWS if invariant else min(power_of_2(rows.shape[0]), MAX_ROWS)
    _product[(cdiv(n_out, COLUMNS), cdiv(rows.shape[0], side))](
        rows, words, y, rows.shape[0], n_out, n_in // GROUP, words.shape[1], rows.stride(0),
        TYPE=type, BM=side, BN=COLUMNS, BG=16 if side <= 4 else 8, num_warps=4,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n_out)


@jit
def _expand(words, y, n_out, n_groups, row_words, TYPE: tl.constexpr, BG: tl.constexpr):
    n, j = tl.program_id(0), tl.program_id(1) * BG + tl.arange(0, BG)[:, None]
    p, inside = tl.arange(0, 16)[None, :], j < n_groups
    even, odd = decode(words + n.to(tl.int64) * row_words, j, p, inside, TYPE)
    numbers = tl.reshape(tl.join(even, odd), (BG, 32)).to(y.dtype.element_ty)
    at = n.to(tl.int64) * n_groups * 32 + j * 32 + tl.arange(0, 32)[None, :]
    tl.store(y + at, numbers, inside)


def expanded_product(rows: Tensor, blocks: Tensor, type: str, dtype: torch.dtype) -> Tensor:
    """The product by the vendor's library, for many rows [n, in], with weights expanded to
    bfloat16, in which the rows are then, too, or float32; f32 [n, out].

    Expanded weights take MOST_EXPANDED numbers at most at a time.
    """
    n_out, n_in = blocks.shape[0], rows.shape[1]
    rows = rows.to(dtype)
    y = torch.empty(len(rows), n_out, device=rows.device)
    step = max(1, MOST_EXPANDED // n_in)
    for start in range(0, n_out, step):
        part = blocks[start : start + step]
        if type in TYPES:
            weight = torch.empty(len(part), n_in, dtype=dtype, device=rows.device)
            words = part.view(torch.int16)
            _expand[(len(part), cdiv(n_in // GROUP, 8))](
                words, weight, len(part), n_in // GROUP, words.shape[1], TYPE=type, BG=8,
                num_warps=4,
            )  # fmt: skip
        else:
            numbers = dequantise(part.reshape(-1), type, len(part) * n_in)
            weight = numbers.view(len(part), n_in).to(dtype)
        to = y[:, start : start + step]
        if dtype == torch.float32:
            torch.mm(rows, weight.t(), out=to)
        else:
            to.copy_(torch.mm(rows, weight.t(), out_dtype=torch.float32))
    return y


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
