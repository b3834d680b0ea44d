"""Cells on a processor: a task copies one head of a token."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import Code, Program, Value
from kernels.llvm.rows import rows as in_rows
from kernels.llvm.rows import run, start
from kernels.llvm.values import I64


def write_cells(
    storage: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """See kernels.rows.cells.write_cells."""
    _, n_heads, n_cells, dim = storage.shape
    rows, places = in_rows(rows)
    run(
        _program(),
        streams.numel() * n_heads,
        dim,
        storage.data_ptr(),
        *places,
        streams.data_ptr(),
        cells.data_ptr(),
        n_heads,
        n_cells,
        4 * dim,
    )


@functools.cache
def _program() -> Program:
    return Program(_body, 10)


def _body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: storage, rows in RowPlaces, streams, cells, heads, cells of a stream, bytes of a
    row."""
    storage, streams, cells, n_heads, n_cells, n_bytes = args[0], *args[5:]
    with code.loop(first, last) as row:
        token, head = row // n_heads, row % n_heads
        stream, cell = (code.load(numbers + token * 8, I64) for numbers in (streams, cells))
        place = ((stream * n_heads + head) * n_cells + cell) * n_bytes
        code.copy(storage + place, start(args[1:5], row), n_bytes)
