"""A table that stays in its file: rows are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import ModelFileError
from engine.gguf.binary import DAMAGED
from kernels.dequant import dequantise
from kernels.rows import take_rows


class MappedRows:
    """Rows of a tensor of a mapped file.

    data: uint8 [n_bytes], the mapping itself, which lives on with it. type: name of the GGML
    type. shape: rows and columns. is_whole: whether the file still reaches to the tensor's end.
    path, name: for errors.
    """

    def __init__(
        self,
        data: torch.Tensor,
        type: str,
        shape: tuple[int, ...],
        is_whole: Callable[[], bool],
        path: Path,
        name: str,
    ) -> None:
        n_rows, self._width = shape
        self._rows, self._type = data.view(n_rows, -1), type
        self._is_whole, self._path, self._name = is_whole, path, name

    def check(self) -> None:
        """Raises ModelFileError when the file has been cut short: reading a mapping beyond the end
        of its file kills the process. To be called before every pass that takes rows."""
        if not self._is_whole():
            what = "the file has become shorter since it was opened"
            raise ModelFileError(self._path, f"tensor {self._name}", what, DAMAGED)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by number, int64 of any shape, as float32 [*numbers.shape, width] on its device.

        On the processor the host looks at none of the numbers.
        """
        blocks = take_rows(self._rows, numbers.cpu().flatten())
        if self._type == "F32":
            rows = blocks.view(torch.float32)
        else:
            rows = dequantise(blocks.view(-1), self._type, numbers.numel() * self._width)
        return rows.view(*numbers.shape, self._width).to(numbers.device)
