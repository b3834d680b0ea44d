"""The compute modes through the fastest product this processor has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import integers
from kernels.linear.packed import INTEGER_MODES, PackedWeight


def pack(weight: Tensor, mode: str) -> PackedWeight:
    n_out, n_in = weight.shape
    shape, n_elements = (n_out, n_in), n_out * n_in
    if mode == "f32":
        return PackedWeight(mode, shape, 4 * n_elements, weight)
    if mode == "bf16":
        rounded = weight.to(torch.bfloat16)
        if has_bf16():
            reordered = torch.ops.mkldnn._reorder_linear_weight(rounded)
            return PackedWeight(mode, shape, 2 * n_elements, reordered)
        # without the instructions a bfloat16 product is up to 20 times slower than f32's, and
        # f32 multiplies the rounded numbers exactly
        return PackedWeight(mode, shape, 4 * n_elements, rounded.float())
    return integers.pack(weight, mode)


def pack_bf16_on_gpu(weight: Tensor, device: torch.device) -> PackedWeight:
    """A weight f32 [out, in] rounded to bfloat16, on a CUDA device, which multiplies bfloat16 and
    sums in f32 without any preparation."""
    n_out, n_in = weight.shape
    return PackedWeight(
        "bf16", (n_out, n_in), 2 * n_out * n_in, weight.to(torch.bfloat16).to(device)
    )


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    if packed.mode in INTEGER_MODES:
        return integers.linear(x, packed)
    rows, _ = prepare_rows(x, packed)
    return multiply_rows(rows, packed).float()


def prepare_rows(x: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor | None]:
    if packed.mode in INTEGER_MODES:
        return integers.prepare_rows(x, packed)
    if packed.mode == "f32":
        return x, None
    rounded = x.to(torch.bfloat16)
    return (rounded.float() if packed.data.dtype == torch.float32 else rounded), None


def multiply_rows(rows: Tensor, packed: PackedWeight) -> Tensor:
    if packed.mode in INTEGER_MODES:
        return integers.multiply_rows(rows, packed)
    if packed.data.dtype == torch.float32:
        return functional.linear(rows, packed.data)
    if rows.is_cuda:
        flat = rows.reshape(-1, packed.shape[1])
        y = torch.mm(flat, packed.data.t(), out_dtype=torch.float32)
        return y.view(*rows.shape[:-1], packed.shape[0])
    return torch.ops.mkldnn._linear_pointwise(rows, packed.data, None, "none", [], "")


def has_bf16() -> bool:
    """Whether this processor multiplies packed bfloat16 matrices."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
