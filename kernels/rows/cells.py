"""Keys or values of new tokens on their way into attention cells."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.dispatch import operation, runs_triton
from kernels.llvm import Code, Value, kernel
from kernels.llvm.functions import run, start
from kernels.llvm.values import I64

CellPlaces = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cells for keys and for values, streams and cells of tokens: see write_keys_and_values."""


@operation(triton="kernels.rows.with_triton", llvm=__name__)
def write_cells(storage: Tensor, rows: Tensor, streams: Tensor, cells: Tensor) -> None:
    """storage[streams[i], :, cells[i]] = the i-th row.

    storage: f32 [n_streams, H, n_cells, d], contiguous. rows: f32 [B, T, H, d], any strides.
    streams, cells: int64 [B * T], in memory: the host looks at none of them. No cell comes twice.
    """
    storage.transpose(1, 2)[streams, cells] = rows.flatten(0, 1)


def write_keys_and_values(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, streams: Tensor, cells: Tensor
) -> None:
    """write_cells of k to keys and of v to values, on a GPU in one launch."""
    if runs_triton(keys):
        from kernels.rows import with_triton

        with_triton.write_cells_each(((keys, k), (values, v)), streams, cells)
    else:
        write_cells(keys, k, streams, cells)
        write_cells(values, v, streams, cells)


def write_cells_with_llvm(storage: Tensor, rows: Tensor, streams: Tensor, cells: Tensor) -> None:
    """Cells on a CPU: a task copies one head of a token."""
    _, n_heads, n_cells, dim = storage.shape
    sizes = n_heads, n_cells, 4 * dim
    run(_program(), streams.numel() * n_heads, dim, storage, (rows,), streams, cells, *sizes)


@kernel(10)
def _program(code: Code, args: Sequence[Value], row: Value) -> None:
    """Arguments: storage, rows in RowPlaces, streams, cells, heads, cells of a stream, bytes of a
    row."""
    storage, streams, cells, n_heads, n_cells, n_bytes = args[0], *args[5:]
    token, head = row // n_heads, row % n_heads
    stream, cell = (code.load(numbers + token * 8, I64) for numbers in (streams, cells))
    place = ((stream * n_heads + head) * n_cells + cell) * n_bytes
    code.copy(storage + place, start(args[1:5], row), n_bytes)
