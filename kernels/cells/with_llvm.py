"""Cells on a processor: a task copies one head of a token, its key and its value."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import Code, Program, Value
from kernels.llvm.rows import rows, run, start
from kernels.llvm.values import I64


def write_cells(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    streams: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """See kernels.cells.write_cells."""
    _, n_heads, n_cells, head_dim = keys.shape
    k, k_rows = rows(k)
    v, v_rows = rows(v)
    run(
        _program(),
        streams.numel() * n_heads,
        2 * head_dim,
        keys.data_ptr(),
        values.data_ptr(),
        *k_rows,
        *v_rows,
        streams.data_ptr(),
        cells.data_ptr(),
        n_heads,
        n_cells,
        4 * head_dim,
    )


@functools.cache
def _program() -> Program:
    return Program(_body, 15)


def _body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: keys, values, k and v in RowPlaces, streams, cells, heads, cells of a stream,
    bytes of a head."""
    keys, values, streams, cells, n_heads, n_cells, n_bytes = *args[:2], *args[10:]
    with code.loop(first, last) as row:
        token, head = row // n_heads, row % n_heads
        stream, cell = (code.load(numbers + token * 8, I64) for numbers in (streams, cells))
        place = ((stream * n_heads + head) * n_cells + cell) * n_bytes
        code.copy(keys + place, start(args[2:6], row), n_bytes)
        code.copy(values + place, start(args[6:10], row), n_bytes)
