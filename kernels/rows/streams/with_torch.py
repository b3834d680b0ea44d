"""The formulas in few operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.whole_vectors import pointwise


def open_low(low: torch.Tensor, n_streams: int, *, invariant: bool = False) -> torch.Tensor:
    """See kernels.rows.streams.open_low."""
    return pointwise(functional.silu, low / n_streams, invariant=invariant)


def open_low_invariant(low: torch.Tensor, n_streams: int) -> torch.Tensor:
    """open_low, with each result's bits independent of the numbers around it."""
    return open_low(low, n_streams, invariant=True)


def mix_streams(x: torch.Tensor, gate: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """See kernels.rows.streams.mix_streams."""
    gate = pointwise(torch.sigmoid, gate, invariant=invariant)
    # one after the other: a sum over them all may take another order in another batch
    first, *others = (x * gate).unbind(-2)
    for other in others:
        first = first + other
    return first / x.shape[-2]


def mix_streams_invariant(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """mix_streams, with each result's bits independent of the numbers around it."""
    return mix_streams(x, gate, invariant=True)


def add_to_streams(
    x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor, *, invariant: bool = False
) -> torch.Tensor:
    """See kernels.rows.streams.add_to_streams."""
    gain = 2 * pointwise(torch.sigmoid, gain / x.shape[-2], invariant=invariant)
    return x + y[..., None, :] * gain[..., None]


def add_to_streams_invariant(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """add_to_streams, with each result's bits independent of the numbers around it."""
    return add_to_streams(x, y, gain, invariant=True)
