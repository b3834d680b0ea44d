"""bf16 products of a GPU, which multiplies bfloat16 and sums in f32 without any preparation."""

from __future__ import annotations

import torch

from kernels.linear.packed import Packed


def pack_bf16(weight: torch.Tensor, device: torch.device) -> Packed:
    """A weight f32 [out, in] rounded to bfloat16, on a CUDA device."""
    n_out, n_in = weight.shape
    return Packed("bf16", (n_out, n_in), 2 * n_out * n_in, weight.to(torch.bfloat16).to(device))


def linear_bf16(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See kernels.linear.linear: x [..., in] is rounded too, the result stays f32."""
    rows = x.reshape(-1, packed.shape[1]).to(torch.bfloat16)
    y = torch.mm(rows, packed.data.t(), out_dtype=torch.float32)
    return y.view(*x.shape[:-1], packed.shape[0])
