"""A table of which rows are decoded when they are asked for."""

from __future__ import annotations

import torch

from kernels.linear.dequant import decodes_on_gpu, dequantise
from kernels.rows import take_rows


class StoredRows:
    """Rows of a tensor as it is stored, in the mapped file or a copy.

    data: uint8 [n_bytes]. type: name of the GGML type. shape: rows and columns.
    """

    def __init__(self, data: torch.Tensor, type: str, shape: tuple[int, ...]) -> None:
        n_rows, self._width = shape
        self._rows, self._type = data.view(n_rows, -1), type

    @property
    def n_bytes(self) -> int:
        return self._rows.nbytes

    def to(self, device: torch.device) -> StoredRows:
        """The table on a CUDA device, for numbers that are there."""
        shape = len(self._rows), self._width
        if decodes_on_gpu(self._type):
            return StoredRows(self._rows.view(-1).to(device), self._type, shape)
        numbers = self.take(torch.arange(len(self._rows))).view(torch.uint8)
        return StoredRows(numbers.view(-1).to(device), "F32", shape)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by number, int64 of any shape on the table's device, as float32
        [*numbers.shape, width] there. The host looks at none of the numbers."""
        blocks = take_rows(self._rows, numbers.flatten())
        if self._type == "F32":
            rows = blocks.view(torch.float32)
        else:
            rows = dequantise(blocks.view(-1), self._type, numbers.numel() * self._width)
        return rows.view(*numbers.shape, self._width)
