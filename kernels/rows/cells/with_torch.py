"""Cells by index."""

from __future__ import annotations

import torch


def write_cells(
    storage: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """See kernels.rows.cells.write_cells."""
    storage.transpose(1, 2)[streams, cells] = rows.flatten(0, 1)
