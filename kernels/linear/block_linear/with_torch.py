"""The product with weights expanded for the call: right everywhere, fast nowhere."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.linear.dequant import dequantise


def block_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    rounded: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.linear.block_linear.block_linear."""
    n_out, n_in = blocks.shape[0], x.shape[-1]
    weight = dequantise(blocks.reshape(-1), type, n_out * n_in).view(n_out, n_in)
    x = x.float()
    if rounded:
        x, weight = x.to(torch.bfloat16).float(), weight.to(torch.bfloat16).float()
    if not invariant:
        return functional.linear(x, weight)
    # one by one, each in memory of its own: sums may depend on alignment
    rows = [functional.linear(row.clone(), weight) for row in x.reshape(-1, n_in).split(1)]
    return torch.cat(rows).view(*x.shape[:-1], n_out)
