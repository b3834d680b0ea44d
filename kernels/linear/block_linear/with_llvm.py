"""The product on a processor, straight from the blocks."""

from __future__ import annotations

import torch

from kernels.linear.block_linear.operands_with_llvm import arithmetic
from kernels.linear.block_linear.panels_with_llvm import multiply_panels
from kernels.linear.block_linear.rows_with_llvm import ROWS, multiply_rows
from kernels.llvm.panels import TOGETHER, WIDEST


def block_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    rounded: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.linear.block_linear.block_linear."""
    how, n_in, n_out = arithmetic(rounded=rounded), x.shape[-1], blocks.shape[0]
    rows = x.float().reshape(-1, n_in).contiguous()
    n_rows = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n_out)
    flat = y.view(n_rows, n_out)
    in_panels = n_out >= TOGETHER and n_in * how.size <= WIDEST
    if in_panels and (n_rows > ROWS or invariant):
        multiply_panels(rows, blocks, type, how, flat)
    elif n_rows <= ROWS:
        multiply_rows(rows, blocks, type, how, flat)
    else:
        for part, out in zip(rows.split(ROWS), flat.split(ROWS), strict=True):
            multiply_rows(part, blocks, type, how, out)
    return y
