"""The integer products on a processor."""

from __future__ import annotations

import torch

from kernels.integer_blocks.rows_with_llvm import ROWS, multiply_rows


def integer_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.integer_blocks.integer_linear."""
    n_in, n_out = x.shape[-1], blocks.shape[0]
    rows = x.reshape(-1, n_in).contiguous()
    y = torch.empty(*x.shape[:-1], n_out)
    flat = y.view(rows.shape[0], n_out)
    for part, out in zip(rows.split(ROWS), flat.split(ROWS), strict=True):
        multiply_rows(part, blocks, type, out)
    return y
