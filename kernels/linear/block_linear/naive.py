"""The product with expanded weights, summed in f64."""

from __future__ import annotations

import torch

from kernels.linear.dequant import dequantise


def block_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    rounded: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.linear.block_linear.block_linear. Sums in f64, whose order f32 does not show."""
    n_out, n_in = blocks.shape[0], x.shape[-1]
    weight = dequantise(blocks.reshape(-1), type, n_out * n_in).view(n_out, n_in)
    if rounded:
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    return (x.double() @ weight.double().T).float()
