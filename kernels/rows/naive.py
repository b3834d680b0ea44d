"""Rows one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def take_rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.take_rows."""
    rows = torch.empty(numbers.numel(), *table.shape[1:], dtype=table.dtype)
    for i, number in enumerate(numbers.flatten().tolist()):
        rows[i] = table[number]
    return rows.view(*numbers.shape, *table.shape[1:])


def put_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """See kernels.rows.put_rows."""
    flat = rows.reshape(numbers.numel(), *table.shape[1:])
    for i, number in enumerate(numbers.flatten().tolist()):
        table[number] = flat[i]


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """See kernels.rows.copy_rows."""
    for place in torch.cartesian_prod(*(torch.arange(n) for n in source.shape)).view(
        -1, source.dim()
    ):
        target[tuple(place)] = source[tuple(place)]


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """See kernels.rows.join."""
    columns = [column for part in parts for column in part.unbind(-1)]
    return torch.stack(columns, -1)
