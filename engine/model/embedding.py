"""The table of token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.model.rows import Rows
from kernels.dequant import dequantise


class Embedding:
    """Rows of a table, f32 or in the blocks of its file; looked up, both give the same bits."""

    __slots__ = ("_width", "rows")

    def __init__(self, rows: Rows, width: int) -> None:
        """width: numbers in a row."""
        self.rows = rows
        self._width = width

    @property
    def device(self) -> torch.device:
        return self.rows.data.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [B, T] -> f32 [B, T, width]."""
        table, type = self.rows.data, self.rows.type
        if type is None:
            return F.embedding(tokens, table)
        blocks = table.index_select(0, tokens.flatten())
        n_elements = tokens.numel() * self._width
        return dequantise(blocks.view(-1), type, n_elements).view(*tokens.shape, self._width)
