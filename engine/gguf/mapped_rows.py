"""A table that stays in its file: rows are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.errors import ModelFileError
from engine.gguf.binary import DAMAGED
from kernels.dequant import dequantise


class MappedRows:
    """Rows of a tensor of a mapped file.

    data: uint8 [n_bytes], a view of the mapping, which lives on with it. type: name of the GGML
    type. shape: rows and columns. is_whole: whether the file still reaches to the tensor's end.
    path, name: for errors.
    """

    def __init__(
        self,
        data: np.ndarray,
        type: str,
        shape: tuple[int, ...],
        is_whole: Callable[[], bool],
        path: Path,
        name: str,
    ) -> None:
        n_rows, self._width = shape
        self._rows, self._type = data.reshape(n_rows, -1), type
        self._is_whole, self._path, self._name = is_whole, path, name

    def take(self, ids: np.ndarray) -> torch.Tensor:
        """Rows by number, int64 of any shape, as float32 [*ids.shape, width].

        Raises ModelFileError when the file has been cut short meanwhile.
        """
        # reading a mapping beyond the end of its file kills the process
        if not self._is_whole():
            what = "the file has become shorter since it was opened"
            raise ModelFileError(self._path, f"tensor {self._name}", what, DAMAGED)
        blocks = torch.from_numpy(self._rows[ids.ravel()])
        rows = dequantise(blocks.view(-1), self._type, ids.size * self._width)
        return rows.view(*ids.shape, self._width)
