"""The formulas as they read."""

from __future__ import annotations

import torch


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def open_low(low: torch.Tensor, n_streams: int) -> torch.Tensor:
    """See kernels.rows.streams.open_low."""
    x = low / n_streams
    return x * _sigmoid(x)


def mix_streams(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.streams.mix_streams."""
    return (x * _sigmoid(gate)).mean(-2)


def add_to_streams(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.streams.add_to_streams."""
    return x + 2 * _sigmoid(gain / x.shape[-2])[..., None] * y[..., None, :]
