"""The product with expanded weights, summed in f64."""

from __future__ import annotations

import torch

from kernels.dequant import dequantise


def block_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.block_linear.block_linear."""
    n_out, n_in = blocks.shape[0], x.shape[-1]
    weight = dequantise(blocks.reshape(-1), type, n_out * n_in).view(n_out, n_in)
    return (x.double() @ weight.double().T).float()
