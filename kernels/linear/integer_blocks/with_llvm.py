"""The integer products on a processor."""

from __future__ import annotations

import torch

from kernels.linear.integer_blocks.panels_with_llvm import multiply_panels
from kernels.linear.integer_blocks.rows_with_llvm import ROWS, multiply_rows


def integer_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.linear.integer_blocks.integer_linear."""
    n_in, n_out = x.shape[-1], blocks.shape[0]
    rows = x.reshape(-1, n_in).contiguous()
    n_rows = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n_out)
    if n_rows:
        multiply = multiply_rows if n_rows <= ROWS else multiply_panels
        multiply(rows, blocks, type, y.view(n_rows, n_out))
    return y
