"""Keys or values of new tokens on their way into attention cells."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.cells import naive, with_torch

_run = pick(naive.write_cells, with_torch.write_cells, None, "kernels.rows.cells.with_llvm")


def write_cells(
    storage: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """storage[streams[i], :, cells[i]] = the i-th row.

    storage: f32 [n_streams, H, n_cells, d], contiguous. rows: f32 [B, T, H, d], any strides.
    streams, cells: int64 [B * T], in memory: the host looks at none of them. No cell comes twice.
    """
    _run(storage, rows, streams, cells)
