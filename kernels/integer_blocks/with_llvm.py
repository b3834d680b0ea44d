"""The integer products on a processor."""

from __future__ import annotations

import torch

from kernels.integer_blocks.panels_with_llvm import multiply_panels
from kernels.integer_blocks.rows_with_llvm import multiply_rows

FEW = 7
"""Up to so many rows it is faster to keep each weight in registers for all of them; one more where
a weight is a byte, which needs no taking apart."""


def integer_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.integer_blocks.integer_linear."""
    n_in, n_out = x.shape[-1], blocks.shape[0]
    rows = x.reshape(-1, n_in).contiguous()
    n_rows = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n_out)
    if n_rows:
        multiply = multiply_rows if n_rows <= FEW + (type == "Q8_0") else multiply_panels
        multiply(rows, blocks, type, y.view(n_rows, n_out))
    return y
