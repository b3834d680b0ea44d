"""Sums in one operation."""

from __future__ import annotations

import torch


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """See kernels.pointwise.residual.add."""
    return x + y
