"""Products of one batch of rows with many matrices: what only concerns the rows is done once."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.linear import integers, linear
from kernels.linear.blocks import takes_any_rows
from kernels.linear.packed import INTEGER_MODES, Packed


def prepare(x: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of x f32 [n, in] as `product` takes them for every matrix packed like this one.

    Also returns what `finish` multiplies the results of each row with, [n, 1], if anything.
    """
    if packed.mode in INTEGER_MODES:
        return integers.prepare(x, packed)
    if packed.mode == "f32" or takes_any_rows(packed):
        return x, None
    rounded = x.to(torch.bfloat16)
    return (rounded.float() if packed.data.dtype == torch.float32 else rounded), None


def product(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Prepared rows [n, in] -> unfinished results [n, out]."""
    if takes_any_rows(packed):
        return linear(rows, packed)
    if packed.mode in INTEGER_MODES:
        return integers.product(rows, packed)
    if packed.data.dtype == torch.float32:
        return functional.linear(rows, packed.data)
    return torch.ops.mkldnn._linear_pointwise(rows, packed.data, None, "none", [], "")


def finish(y: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Results of `product` as f32, in place where they are; scale: the rows' own, of `prepare`."""
    return y.float() if scale is None else y.mul_(scale)
