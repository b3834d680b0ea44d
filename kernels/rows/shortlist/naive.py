"""The largest values by sorting everything."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def shortlist(x: torch.Tensor, k: int) -> torch.Tensor:
    """See kernels.rows.shortlist.shortlist."""
    order = [_largest_first(row)[:k] for row in x.reshape(-1, x.shape[-1]).tolist()]
    return torch.tensor(order, device=x.device).view(*x.shape[:-1], k)


def _largest_first(row: Sequence[float]) -> list[int]:
    # a stable sort: of equal values the lowest index comes first
    return sorted(range(len(row)), key=lambda i: -row[i])
