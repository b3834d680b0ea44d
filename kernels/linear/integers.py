"""Products of small integers: through LLVM where the processor has an instruction for them, else
through fbgemm, else exactly and slowly."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from kernels.dispatch import uses_llvm
from kernels.linear.packed import ROW_LEVELS, Integers, Packed, pack_integers, quantise_rows

FULL_LEVELS = 127
# 2 * 255 * 64 still fits the 16 bits in which processors without VNNI add pairs of products
SAFE_LEVELS = 64


def pack(weight: torch.Tensor, mode: str) -> Packed:
    """A weight f32 [out, in] as integers with one scale per row, for a mode that sums them."""
    if has_vnni() or not has_fbgemm():
        return pack_integers(weight, mode)
    n_out, n_in = weight.shape
    data = _prepack(*quantise_rows(weight, int8_levels()))
    return Packed(mode, (n_out, n_in), n_out * n_in + 4 * n_out, data)


def product(rows: torch.Tensor, scales: torch.Tensor | None, data: Any) -> torch.Tensor:
    """rows f32 [n, in] within -1 .. 1, rounded to 127ths, times the weight; f32 [n, out].

    scales: f32 [n, 1] to multiply the results of each row with. Sums are exact, so a row has the
    same bits in any company.
    """
    if isinstance(data, Integers):
        if has_vnni():
            from kernels.linear import integers_with_llvm

            ones = rows.new_ones(len(rows), 1) if scales is None else scales
            return integers_with_llvm.multiply(rows, ones, data)
        sums = (rows * ROW_LEVELS).round().double() @ data.weight.double().T
        y = (sums * (data.scale.double() / ROW_LEVELS)).float()
    else:
        # activations as unsigned bytes around 128, the form the fast products want
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
            rows, 1 / ROW_LEVELS, 128, data
        )
    return y if scales is None else y.mul_(scales)


@functools.cache
def has_vnni() -> bool:
    """Whether LLVM compiles products of integers for this processor."""
    if not uses_llvm():
        return False
    from kernels.linear import integers_with_llvm

    return integers_with_llvm.available()


def has_fbgemm() -> bool:
    """Whether this PyTorch has the int8 products of x86 processors."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@functools.cache
def int8_levels() -> int:
    """The largest weight integer whose products add up exactly in fbgemm on this processor.

    Without VNNI the instructions add two products in 16 bits and saturate; found by trying the
    worst case, since PyTorch does not say which instructions it uses.
    """
    ones = torch.ones(2, 64)
    data = _prepack(*quantise_rows(ones, FULL_LEVELS))
    exact = torch.allclose(product(ones, None, data), torch.tensor(64.0), rtol=1e-4)
    return FULL_LEVELS if exact else SAFE_LEVELS


def _prepack(integers: torch.Tensor, scale: torch.Tensor) -> Any:
    zeros = torch.zeros(scale.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():
        # PyTorch 2.13 announces the end of its quantised tensors; pyproject.toml stays below it
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)
