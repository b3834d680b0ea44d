"""Products of small integers as PyTorch has them on x86 processors."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from kernels.linear.packed import ROW_LEVELS, WEIGHT_LEVELS, Packed, quantise_rows

# 2 * 255 * 64 still fits the 16 bits in which processors without VNNI add pairs of products
SAFE_LEVELS = 64


def available() -> bool:
    """Whether this PyTorch has them."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack(weight: torch.Tensor, mode: str) -> Packed:
    """A weight f32 [out, in] for a mode that sums integers."""
    n_out, n_in = weight.shape
    data = prepack(*quantise_rows(weight, levels()))
    return Packed(mode, (n_out, n_in), n_out * n_in + 4 * n_out, data)


def product(rows: torch.Tensor, data: Any) -> torch.Tensor:
    """rows f32 [..., in] within -1 .. 1, rounded to 127ths, times the weight; f32 [..., out]."""
    # activations as unsigned bytes around 128, the form the fast products want
    y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
        rows, 1 / ROW_LEVELS, 128, data
    )
    return y


@functools.cache
def levels() -> int:
    """The largest weight integer whose products add up exactly on this processor.

    Without VNNI the instructions add two products in 16 bits and saturate; found by trying the
    worst case, since PyTorch does not say which instructions it uses.
    """
    ones = torch.ones(2, 64)
    data = prepack(*quantise_rows(ones, WEIGHT_LEVELS))
    exact = torch.allclose(product(ones, data), torch.tensor(64.0), rtol=1e-4)
    return WEIGHT_LEVELS if exact else SAFE_LEVELS


def prepack(integers: torch.Tensor, scale: torch.Tensor) -> Any:
    """int8 [out, in] and f32 [out], as `product` takes them."""
    zeros = torch.zeros(scale.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():
        # PyTorch 2.13 announces the end of its quantised tensors; pyproject.toml stays below it
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)
