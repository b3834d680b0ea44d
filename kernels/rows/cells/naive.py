"""Cells one by one."""

from __future__ import annotations

import torch


def write_cells(
    storage: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """See kernels.rows.cells.write_cells."""
    n_tokens = rows.shape[1]
    for i, (stream, cell) in enumerate(zip(streams.tolist(), cells.tolist(), strict=True)):
        storage[stream, :, cell] = rows[i // n_tokens, i % n_tokens]
