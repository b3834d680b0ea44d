"""Kernels on the rows of tensors: where a row starts, its vectors, how the rows are shared out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from kernels.llvm.code import Code
from kernels.llvm.program import Program
from kernels.llvm.values import F32X16, Value

LANES = F32X16.count
# this many numbers are done before a second thread has woken up
ALONE = 1 << 15


RowPlaces = tuple[int, int, int, int]
"""Arguments of a program: row r, of neighbours in memory, starts at
address + r // inner * outer + r % inner * step."""


def rows(x: torch.Tensor) -> tuple[torch.Tensor, RowPlaces]:
    """x [..., d] of 4 bytes a number, or a copy of it, and where its rows are.

    A view of some columns, also of some heads, needs no copy. The address is good for as long as
    the tensor is kept.
    """
    if not x.is_contiguous():
        layout = _layout(x.shape, x.stride())
        if layout is not None:
            return x, (x.data_ptr(), *layout)
        x = x.contiguous()
    return x, (x.data_ptr(), 1, 4 * x.shape[-1], 0)


def start(rows: Sequence[Value], row: Value) -> Value:
    """The address of a row of RowPlaces."""
    address, inner, outer, step = rows
    return address + row // inner * outer + row % inner * step


def vectors(code: Code, width: int, at_once: int = 1) -> Iterator[tuple[Value, int]]:
    """The vectors of a row: their place in bytes, and how many of their numbers are in the row.

    at_once: vectors in one turn of the loop. The same operations on every vector, full or not,
    give every number of a row the same bits wherever it is.
    """
    turn = LANES * at_once
    whole = width - width % turn
    if whole:
        with code.loop(0, code.integer(4 * whole), 4 * turn) as at:
            for i in range(at_once):
                yield at + 4 * LANES * i, LANES
    for first in range(whole, width, LANES):
        yield code.integer(4 * first), min(LANES, width - first)


def run(program: Program, n_rows: int, width: int, *args: int) -> None:
    """A task for every row of `width` numbers, on as many threads as are worth waking."""
    if n_rows * width <= ALONE:
        program.alone(n_rows, *args)
    else:
        chunk = max(1, ALONE // 4 // width)
        program(*args, tasks=n_rows, chunk=chunk, threads=torch.get_num_threads())


@functools.lru_cache(1024)
def _layout(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """inner, outer and step of RowPlaces, None where two strides do not reach every row."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        elif size != 1:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    (_, outer), (inner, step) = [(1, 0), (1, 0), *merged][-2:]
    return max(1, inner), 4 * outer, 4 * step
