"""The compute modes through the fastest product this processor has."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.linear import integers
from kernels.linear.packed import Packed


def pack(weight: torch.Tensor, mode: str) -> Packed:
    """See kernels.linear.pack."""
    n_out, n_in = weight.shape
    shape, n_elements = (n_out, n_in), n_out * n_in
    if mode == "f32":
        return Packed(mode, shape, 4 * n_elements, weight)
    if mode == "bf16":
        rounded = weight.to(torch.bfloat16)
        if has_bf16():
            reordered = torch.ops.mkldnn._reorder_linear_weight(rounded)
            return Packed(mode, shape, 2 * n_elements, reordered)
        # without the instructions a bfloat16 product is up to 20 times slower than f32's, and
        # f32 multiplies the rounded numbers exactly
        return Packed(mode, shape, 4 * n_elements, rounded.float())
    return integers.pack(weight, mode)


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See kernels.linear.linear."""
    if packed.mode == "f32":
        return functional.linear(x, packed.data)
    if packed.mode == "bf16":
        rounded = x.to(torch.bfloat16)
        if packed.data.dtype == torch.float32:
            return functional.linear(rounded.float(), packed.data)
        return torch.ops.mkldnn._linear_pointwise(
            rounded, packed.data, None, "none", [], ""
        ).float()
    return integers.linear(x, packed)


def has_bf16() -> bool:
    """Whether this processor multiplies packed bfloat16 matrices."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
