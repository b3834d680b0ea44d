"""The compute modes in exact sums: f64, in which integer products do not round at all."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.packed import (
    INTEGER_MODES,
    ROW_LEVELS,
    SECOND_ROW_STEPS,
    WEIGHT_LEVELS,
    PackedWeight,
    quantise_rows,
    split_rows,
)
from kernels.linear.rounding import max_norm_naive


def pack(weight: Tensor, mode: str, levels: int = WEIGHT_LEVELS) -> PackedWeight:
    """See kernels.linear.pack. levels: the largest integer of a weight; the reference of this
    CPU's products is the one with kernels.linear.integers.weight_levels()."""
    n_out, n_in = weight.shape
    if mode in INTEGER_MODES:
        return pack_int8(weight, mode, levels)
    data = weight.to(torch.bfloat16) if mode == "bf16" else weight
    return PackedWeight(mode, (n_out, n_in), data.element_size() * data.numel(), data)


def pack_int8(weight: Tensor, mode: str, levels: int = WEIGHT_LEVELS) -> PackedWeight:
    """A weight f32 [out, in] as int8 [out, in] and scales f32 [out], both of quantise_rows."""
    n_out, n_in = weight.shape
    integers, scale = quantise_rows(weight, levels)
    return PackedWeight(mode, (n_out, n_in), n_out * n_in + 4 * n_out, (integers, scale))


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    if packed.mode == "int8":
        return linear_int8(x, packed)
    if packed.mode == "int8x2":
        return linear_int8x2(x, packed)
    if packed.mode == "bf16":
        x = x.to(torch.bfloat16)
    return (x.double() @ packed.data.double().T).float()


def linear_int8(x: Tensor, packed: PackedWeight) -> Tensor:
    """The integer product of pack_int8's matrix, exact before the scales come in."""
    integers, scale = packed.data
    rows, largest = max_norm_naive(x)
    rows = (rows * ROW_LEVELS).round()
    sums = rows.double() @ integers.double().T
    return (sums * (largest.double() / ROW_LEVELS) * scale.double()).float()


def linear_int8x2(x: Tensor, packed: PackedWeight) -> Tensor:
    """The product with pack_int8's matrix, exact before the scales come in."""
    integers, scale = packed.data
    first, second, largest = split_rows(x)
    sums = (first.double() * SECOND_ROW_STEPS + second.double()) @ integers.double().T
    return (sums * (largest.double() / (ROW_LEVELS * SECOND_ROW_STEPS)) * scale.double()).float()
