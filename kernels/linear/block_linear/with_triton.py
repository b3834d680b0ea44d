"""The product straight from GGUF blocks: each weight expanded in registers, read once.

A program forms BN columns of the result for up to 16 rows of x. Sums run in f32 over four
axes, one number for each pair of a tile, and are added up at the end.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.linear.block_linear import with_torch
from kernels.linear.block_linear.decode_with_triton import decode
from kernels.triton_setup import cdiv, jit, power_of_2

GROUP = 32
MAX_ROWS = 16
COLUMNS = 4


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
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    rounded: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.linear.block_linear.block_linear."""
    if rounded:
        return with_torch.block_linear(x, blocks, type, rounded=True, invariant=invariant)
    n_out, n_in = blocks.shape[0], x.shape[-1]
    rows = x.reshape(-1, n_in)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    words = blocks.view(torch.int16)
    y = torch.empty(rows.shape[0], n_out, dtype=torch.float32, device=x.device)
    # the shape of a tile decides in which order a row is summed
    side = MAX_ROWS if invariant else min(power_of_2(rows.shape[0]), MAX_ROWS)
    _product[(cdiv(n_out, COLUMNS), cdiv(rows.shape[0], side))](
        rows, words, y, rows.shape[0], n_out, n_in // GROUP, words.shape[1], rows.stride(0),
        TYPE=type, BM=side, BN=COLUMNS, BG=16 if side <= 4 else 8, num_warps=4,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n_out)
