"""Rows through PyTorch's own indexing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def take_rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.take_rows."""
    rows = table.index_select(0, numbers.flatten())
    return rows.view(*numbers.shape, *table.shape[1:])


def put_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """See kernels.rows.put_rows."""
    table[numbers] = rows


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """See kernels.rows.copy_rows."""
    target.copy_(source)


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """See kernels.rows.join."""
    return torch.cat(tuple(parts), -1)
