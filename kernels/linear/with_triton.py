"""Products of heads on a GPU: a program forms some columns of a head for some tokens, in f32."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kernels.dispatch import torch_version
from kernels.linear import head_linear as op
from kernels.triton_setup import cdiv, jit

# columns of results, and inputs that are multiplied and added up at once
COLUMNS, INPUTS = 32, 32
# tokens in one program, at most: each weight is read once for all of them
TOKENS = 8
# tokens beyond which a vendor's product has whole tiles of them
MANY = 32


@jit
def _head_linear(
    x, weight, y, n_rows, n_heads, n, m, n_tokens, batch_stride, token_stride, head_stride,
    BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
    source = row // n_tokens * batch_stride + row % n_tokens * token_stride + head * head_stride
    matrix = weight + head * n * m
    total = tl.zeros((BT, BN, BM), tl.float32)
    for first in range(0, n, BN):
        i = first + tl.arange(0, BN)
        numbers = tl.load(
            x + source[:, None] + i[None, :], (row < n_rows)[:, None] & (i < n)[None, :], 0.0
        )
        factors = tl.load(
            matrix + i[:, None] * m + column[None, :], (i < n)[:, None] & (column < m)[None, :], 0.0
        )
        total = tl.fma(numbers[:, :, None], factors[None], total)
    results = tl.sum(total, 1)
    target = y + (row[:, None] * n_heads + head) * m + column[None, :]
    tl.store(target, results, (row < n_rows)[:, None] & (column < m)[None, :])


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    n_batch, n_tokens, n_heads, n = x.shape
    m, n_rows = weight.shape[2], n_batch * n_tokens
    if n_rows > MANY:
        return torch_version(op.head_linear)(x, weight)
    if x.stride(3) != 1:
        x = x.contiguous()
    y = torch.empty(n_batch, n_tokens, n_heads, m, device=x.device)
    side = 1 if n_rows == 1 else 4 if n_rows <= 4 else TOKENS
    _head_linear[(n_heads, cdiv(m, COLUMNS), cdiv(n_rows, side))](
        x, weight.contiguous(), y, n_rows, n_heads, n, m, n_tokens, *x.stride()[:3],
        BT=side, BM=COLUMNS, BN=INPUTS, num_warps=4,
    )  # fmt: skip
    return y
