"""The modes that sum integers: through LLVM where the processor multiplies bytes in fours, else
through fbgemm, else exactly and slowly. The packed matrix tells which of them it is for."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import uses_llvm
from kernels.linear import bytes_with_llvm, naive
from kernels.linear.packed import (
    ROW_LEVELS,
    SECOND_ROW_STEPS,
    WEIGHT_LEVELS,
    BytePanels,
    PackedWeight,
    pack_panels,
    quantise_rows,
    split_rows,
)
from kernels.linear.rounding import max_norm
from kernels.processor import has_feature

# rows of integers that a row of x becomes
N_INTEGERS = {"int8": 1, "int8x2": 2}
# 2 * 255 * 64 still fits the 16 bits in which processors without VNNI add pairs of products
SAFE_LEVELS = 64


def pack(weight: Tensor, mode: str) -> PackedWeight:
    """A weight f32 [out, in] for one of INTEGER_MODES."""
    if has_vnni():
        return pack_panels(weight, mode)
    return _pack_fbgemm(weight, mode) if has_fbgemm() else naive.pack_int8(weight, mode)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    if isinstance(packed.data, BytePanels):
        return bytes_with_llvm.linear(x, N_INTEGERS[packed.mode], packed.data, packed.shape[0])
    if isinstance(packed.data, tuple):
        return naive.linear(x, packed)
    if packed.mode == "int8x2":
        return _linear_two_rows(x, packed)
    rows, largest = max_norm(x)
    return _product_fbgemm(rows, packed.data).mul_(largest)


def prepare_rows(x: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor | None]:
    if isinstance(packed.data, BytePanels):
        return bytes_with_llvm.quantise(x, N_INTEGERS[packed.mode]), None
    return (x, None) if packed.mode == "int8x2" else max_norm(x)


def multiply_rows(rows: Tensor, packed: PackedWeight) -> Tensor:
    if isinstance(packed.data, BytePanels):
        n_integers = N_INTEGERS[packed.mode]
        return bytes_with_llvm.product(rows, n_integers, packed.data, packed.shape[0])
    if packed.mode == "int8x2":
        return linear(rows, packed)
    if isinstance(packed.data, tuple):
        integers, scale = packed.data
        sums = (rows * ROW_LEVELS).round().double() @ integers.double().T
        return (sums * (scale.double() / ROW_LEVELS)).float()
    return _product_fbgemm(rows, packed.data)


def weight_levels() -> int:
    """The largest integer that `pack` makes of a weight on this processor."""
    through_fbgemm = not has_vnni() and has_fbgemm()
    return fbgemm_levels() if through_fbgemm else WEIGHT_LEVELS


@functools.cache
def has_vnni() -> bool:
    """Whether LLVM compiles products of bytes for this processor."""
    return uses_llvm() and has_feature("avx512vnni")


def _linear_two_rows(x: Tensor, packed: PackedWeight) -> Tensor:
    """int8x2 through fbgemm: one product of the first and second rows of integers together."""
    first, second, largest = split_rows(x)
    rows = torch.stack((first, second)).reshape(-1, x.shape[-1]) / ROW_LEVELS
    sums = _product_fbgemm(rows, packed.data)
    high, low = sums.view(2, *x.shape[:-1], -1)
    # every operation by itself: fused ones might round the last numbers of a tensor otherwise
    y: Tensor = (low / SECOND_ROW_STEPS + high) * largest
    return y


def has_fbgemm() -> bool:
    """Whether this PyTorch multiplies integers through fbgemm, as it does on x86 processors."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def _pack_fbgemm(weight: Tensor, mode: str) -> PackedWeight:
    """A weight f32 [out, in] as fbgemm keeps it; mode: one of INTEGER_MODES."""
    n_out, n_in = weight.shape
    data = _prepack(*quantise_rows(weight, fbgemm_levels()))
    return PackedWeight(mode, (n_out, n_in), n_out * n_in + 4 * n_out, data)


def _product_fbgemm(rows: Tensor, data: Any) -> Tensor:
    """rows f32 [..., in] within -1 .. 1, rounded to 127ths, times the weight; f32 [..., out]."""
    # activations as unsigned bytes around 128, the form the fast products want
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
        rows, 1 / ROW_LEVELS, 128, data
    )
    return y


@functools.cache
def fbgemm_levels() -> int:
    """The largest weight integer whose products add up exactly on this processor.

    Without VNNI the instructions add two products in 16 bits and saturate; found by trying the
    worst case, since PyTorch does not say which instructions it uses.
    """
    ones = torch.ones(2, 64)
    data = _prepack(*quantise_rows(ones, WEIGHT_LEVELS))
    exact = torch.allclose(_product_fbgemm(ones, data), torch.tensor(64.0), rtol=1e-4)
    return WEIGHT_LEVELS if exact else SAFE_LEVELS


def _prepack(integers: Tensor, scale: Tensor) -> Any:
    """Integers int8 [out, in] and their rows' scales f32 [out], in fbgemm's own layout."""
    zeros = torch.zeros(scale.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():
        # PyTorch 2.13 announces the end of its quantised tensors; pyproject.toml stays below it
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        weight = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)
