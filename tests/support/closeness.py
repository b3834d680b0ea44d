"""How far a result is from the truth, in the measures the kernel tests use."""

from __future__ import annotations

import torch


def nmse(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Squared error over squared truth, in f64; NaN or inf in the result gives NaN or inf."""
    assert result.shape == truth.shape
    result, truth = result.double(), truth.double()
    return float((result - truth).square().sum() / truth.square().sum())
