"""The compute modes through the fastest product this processor has."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.nn import functional

from kernels.linear import naive, two_rows
from kernels.linear.packed import ROW_LEVELS, Packed, quantise_rows
from kernels.norm import max_norm

FULL_LEVELS = 127
# 2 * 255 * 64 still fits the 16 bits in which processors without VNNI add pairs of products
SAFE_LEVELS = 64


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
    if not has_fbgemm():
        return naive.pack_int8(weight, mode)
    data = _prepack(*quantise_rows(weight, int8_levels()))
    return Packed(mode, shape, n_elements + 4 * n_out, data)


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
    if isinstance(packed.data, tuple):
        return naive.linear(x, packed)
    if packed.mode == "int8x2":
        return two_rows.linear(x, packed)
    return _int8_product(x, packed.data)


def has_bf16() -> bool:
    """Whether this processor multiplies packed bfloat16 matrices."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_fbgemm() -> bool:
    """Whether this PyTorch has the int8 products of x86 processors."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@functools.cache
def int8_levels() -> int:
    """The largest weight integer whose products add up exactly on this processor.

    Without VNNI the instructions add two products in 16 bits and saturate; found by trying the
    worst case, since PyTorch does not say which instructions it uses.
    """
    ones = torch.ones(2, 64)
    data = _prepack(*quantise_rows(ones, FULL_LEVELS))
    exact = torch.allclose(_int8_product(ones, data), torch.tensor(64.0), rtol=1e-4)
    return FULL_LEVELS if exact else SAFE_LEVELS


def _prepack(integers: torch.Tensor, scale: torch.Tensor) -> Any:
    zeros = torch.zeros(scale.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():
        # PyTorch 2.13 announces the end of its quantised tensors; pyproject.toml stays below it
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


def _int8_product(x: torch.Tensor, data: Any) -> torch.Tensor:
    rows, largest = max_norm(x)
    # activations as unsigned bytes around 128, the form the fast products want
    y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
        rows, 1 / ROW_LEVELS, 128, data
    )
    return y.mul_(largest)
