"""The compute modes through the fastest product this processor has."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import integers
from kernels.linear.packed import INTEGER_MODES, PackedWeight
from kernels.processor import multiplies_bf16


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


def panels_of(packed: PackedWeight, rows: Tensor) -> Tensor | None:
    """A packed matrix of bf16 as the panels of kernels.rows.take_columns, pairs of its numbers as
    int32, in the same memory; None where it lies otherwise. rows: uint8 [out, 2 in], the same."""
    (n_out, n_in), data = packed.shape, packed.data
    if packed.mode != "bf16" or not data.is_mkldnn or n_in % 2:
        return None
    if torch.ops.mkldnn._nbytes(data) != rows.nbytes:
        return None
    place = int(torch.ops.mkldnn.data_ptr(data)), False
    memory = {"version": 3, "typestr": "<i4", "shape": (n_out * n_in // 2,), "data": place}
    array = np.asarray(SimpleNamespace(__array_interface__=memory, whole=data))
    numbers, pairs = torch.from_numpy(array), rows.view(torch.int32)
    for width in PANEL_WIDTHS:
        if n_out % width == 0:
            panels = numbers.view(-1, n_in // 2, width)
            ends = (panels[0], pairs[:width]), (panels[-1], pairs[-width:])
            if all(torch.equal(panel.t(), own) for panel, own in ends):
                return panels
    return None


PANEL_WIDTHS = 64, 48, 32, 16
"""Rows that oneDNN puts together, for the widest registers first."""


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
    is_built = torch.backends.mkldnn.is_available()
    return is_built and multiplies_bf16() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
