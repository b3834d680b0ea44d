"""Kernels on the rows of tensors: where a row starts, its vectors, how the rows are shared out."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.llvm.code import F32X16, Code, Value
from kernels.llvm.program import Program

LANES = F32X16.count
# so many numbers are done before a second thread has woken up
ALONE = 1 << 15


class Layout(NamedTuple):
    """Row r, of neighbours in memory, starts r // inner * outer + r % inner * step bytes on."""

    inner: int
    outer: int
    step: int


def rows(x: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """x [..., d] of 4 bytes a number, or a copy of it, and where its rows start.

    A view of some columns, also of some heads, needs no copy.
    """
    layout = _layout(x.shape, x.stride())
    if layout is None:
        x = x.contiguous()
        layout = Layout(max(1, x.numel()), 0, 4 * x.shape[-1])
    return x, layout


def start(address: Value, layout: tuple[Value, Value, Value], row: Value) -> Value:
    """Where a row starts; `layout`: the numbers of a Layout."""
    inner, outer, step = layout
    return address + row // inner * outer + row % inner * step


def vectors(code: Code, width: int, at_once: int = 1) -> Iterator[tuple[Value, int]]:
    """The vectors of a row: their place in bytes, and how many of their numbers are in the row.

    at_once: vectors in one turn of the loop. The same operations on every vector, full or not,
    give every number of a row the same bits wherever it stands.
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
        program(*args, tasks=n_rows, chunk=n_rows, threads=1)
    else:
        chunk = max(1, ALONE // 4 // width)
        program(*args, tasks=n_rows, chunk=chunk, threads=torch.get_num_threads())


@functools.lru_cache(1024)
def _layout(shape: torch.Size, strides: tuple[int, ...]) -> Layout | None:
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        elif size != 1:
            merged.append((size, stride))
    if not merged:
        return Layout(1, 0, 0)
    if len(merged) == 1:
        size, stride = merged[0]
        return Layout(max(1, size), 0, 4 * stride)
    if len(merged) > 2:
        return None
    (_, outer), (inner, step) = merged
    return Layout(max(1, inner), 4 * outer, 4 * step)
