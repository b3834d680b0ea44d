"""Cells one by one."""

from __future__ import annotations

import torch


def write_cells(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    streams: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """See kernels.cells.write_cells."""
    n_tokens = k.shape[1]
    for i, (stream, cell) in enumerate(zip(streams.tolist(), cells.tolist(), strict=True)):
        keys[stream, :, cell] = k[i // n_tokens, i % n_tokens]
        values[stream, :, cell] = v[i // n_tokens, i % n_tokens]
