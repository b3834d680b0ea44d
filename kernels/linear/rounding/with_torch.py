"""Rounding by PyTorch's casts."""

from __future__ import annotations

import torch

_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def rounded(x: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.linear.rounding.rounded."""
    return x.to(_TYPES[type]).to(x.dtype)


def round_in_place(x: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_in_place."""
    x.copy_(rounded(x, type))


def round_rows(table: torch.Tensor, numbers: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_rows."""
    table[numbers] = rounded(table[numbers], type)
