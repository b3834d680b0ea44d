"""Rows of tables found by numbers that lie in memory, and rows copied to where they are wanted.

Nothing is computed. The host learns none of the numbers, so a call can be recorded and repeated
with others in them (engine.machine.graphs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation, runs_llvm
from kernels.llvm import Code, Value, kernel
from kernels.llvm.functions import RowPlaces, rows, start
from kernels.llvm.functions import run as run_rows
from kernels.llvm.values import I32, I64


@operation(llvm=__name__, any_type=True)
def take_rows(table: Tensor, numbers: Tensor) -> Tensor:
    """table[numbers]. table: [n, *row], any dtype, any distance from row to row; numbers: int64,
    any shape, 0 .. n - 1, not looked at. Returns [*numbers.shape, *row]."""
    rows = table.index_select(0, numbers.flatten())
    return rows.view(*numbers.shape, *table.shape[1:])


@operation(llvm=__name__, any_type=True)
def take_columns(panels: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a table that lie as columns of panels: row r as panels[r // width, :, r % width].
    panels: int32 [n, d, width], contiguous; numbers: int64, any shape. Returns [*numbers.shape, d].
    """
    width = panels.shape[2]
    return panels[numbers // width, :, numbers % width]


@operation(llvm=__name__, any_type=True)
def put_rows(table: Tensor, numbers: Tensor, rows: Tensor) -> None:
    """table[numbers] = rows. rows: [*numbers.shape, *row]; the numbers differ. What is written must
    not overlap `rows`."""
    table[numbers] = rows


@operation(llvm=__name__, any_type=True)
def copy_rows(target: Tensor, source: Tensor) -> None:
    """target[:] = source. f32 of one shape, not overlapping, any strides."""
    target.copy_(source)


def join(parts: Sequence[Tensor]) -> Tensor:
    """The parts f32 [..., d_i] side by side: [..., sum of d_i]."""
    return join_with_llvm(parts) if runs_llvm(parts[0]) else torch.cat(tuple(parts), -1)


def side_by_side(x: Tensor) -> Tensor:
    """x f32 [..., d] as [n, d] without gaps, a view of it where it has none."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.is_contiguous() else join((rows,))


# Rows on a CPU: a task copies one row.


def take_rows_with_llvm(table: Tensor, numbers: Tensor) -> Tensor:
    taken = table.new_empty(*numbers.shape, *table.shape[1:])
    _run(True, _without_gaps(table), numbers, taken)
    return taken


def take_columns_with_llvm(panels: Tensor, numbers: Tensor) -> Tensor:
    d, width = panels.shape[1:]
    taken = panels.new_empty(*numbers.shape, d)
    run_rows(_column(), numbers.numel(), d, panels, numbers, taken, d, width)
    return taken


def put_rows_with_llvm(table: Tensor, numbers: Tensor, rows: Tensor) -> None:
    """See put_rows. Raises ValueError for rows of the table with gaps."""
    if _without_gaps(table) is not table:
        raise ValueError("the numbers of a table's rows do not lie side by side")
    _run(False, table, numbers, rows)


def copy_rows_with_llvm(target: Tensor, source: Tensor) -> None:
    kept, places = rows(target)
    if kept is not target:
        target.copy_(source)
        return
    _copy(source, places)


def join_with_llvm(parts: Sequence[Tensor]) -> Tensor:
    widths = [part.shape[-1] for part in parts]
    joined = parts[0].new_empty(*parts[0].shape[:-1], sum(widths))
    at = joined.data_ptr()
    for part, width in zip(parts, widths, strict=True):
        _copy(part, (at, 1, 4 * joined.shape[-1], 0))
        at += 4 * width
    return joined


def _without_gaps(table: Tensor) -> Tensor:
    return table if table[:1].is_contiguous() else table.contiguous()


def _run(take: bool, table: Tensor, numbers: Tensor, others: Tensor) -> None:
    size = table.element_size()
    row_bytes, apart = math.prod(table.shape[1:]) * size, table.stride(0) * size
    places = table.data_ptr(), apart, numbers, others, row_bytes
    run_rows(_by_number(take), numbers.numel(), row_bytes // 4, *places)


def _copy(source: Tensor, target: RowPlaces) -> None:
    width = source.shape[-1]
    if source.numel() == 0:
        return
    run_rows(_from_places(), source.numel() // width, width, (source,), *target, 4 * width)


@kernel(5)
def _by_number(code: Code, args: Sequence[Value], i: Value, take: bool) -> None:
    """Arguments: the table, bytes from row to row of it, the numbers, rows, bytes of a row."""
    table, step, numbers, others, row_bytes = args
    numbered = table + code.load(numbers + i * 8, I64) * step
    other = others + i * row_bytes
    code.copy(*((other, numbered) if take else (numbered, other)), row_bytes)


@kernel(5)
def _column(code: Code, args: Sequence[Value], i: Value) -> None:
    """Arguments: the panels, numbers of rows, the rows, their length, rows in a panel."""
    panels, numbers, taken, d, width = args
    number = code.load(numbers + i * 8, I64)
    column = panels + (number // width * d * width + number % width) * 4
    with code.loop(0, d) as k:
        code.store(code.load(column + k * width * 4, I32), taken + (i * d + k) * 4)


@kernel(9)
def _from_places(code: Code, args: Sequence[Value], row: Value) -> None:
    """Arguments: source and target in RowPlaces, bytes of a row."""
    code.copy(start(args[4:8], row), start(args[:4], row), args[8])
