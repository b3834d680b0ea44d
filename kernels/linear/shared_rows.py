"""Products of one batch of rows with many matrices: what only concerns the rows is done once."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.linear import linear, two_rows
from kernels.linear.blocks import in_blocks
from kernels.linear.packed import ROW_LEVELS, Packed
from kernels.norm import max_norm


def prepare(x: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of x f32 [n, in] as `product` takes them for every matrix packed like this one.

    Also returns what `finish` multiplies the results of each row with, [n, 1], if anything.
    """
    if packed.mode in ("f32", "int8x2") or in_blocks(packed):
        return x, None
    if packed.mode == "bf16":
        rounded = x.to(torch.bfloat16)
        return (rounded.float() if packed.data.dtype == torch.float32 else rounded), None
    return max_norm(x)


def product(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Prepared rows [n, in] -> unfinished results [n, out]."""
    if in_blocks(packed):
        return linear(rows, packed)
    if packed.mode == "int8x2":
        return (
            two_rows.law(rows, packed)
            if isinstance(packed.data, tuple)
            else two_rows.linear(rows, packed)
        )
    if packed.mode == "int8":
        if isinstance(packed.data, tuple):
            integers, scale = packed.data
            sums = (rows * ROW_LEVELS).round().double() @ integers.double().T
            return (sums * (scale.double() / ROW_LEVELS)).float()
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
            rows, 1 / ROW_LEVELS, 128, packed.data
        )
    if packed.data.dtype == torch.float32:
        return functional.linear(rows, packed.data)
    return torch.ops.mkldnn._linear_pointwise(rows, packed.data, None, "none", [], "")


def finish(y: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Results of `product` as f32, in place where they are; scale: the rows' own, of `prepare`."""
    return y.float() if scale is None else y.mul_(scale)
