"""Rows on a processor: a task copies one row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from kernels.llvm import Code, Program, Value
from kernels.llvm.rows import RowPlaces, rows, start
from kernels.llvm.rows import run as run_rows
from kernels.llvm.values import I64


def take_rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.take_rows."""
    taken = table.new_empty(*numbers.shape, *table.shape[1:])
    table, numbers = _side_by_side(table), numbers.contiguous()
    _run(True, table, numbers, taken)
    return taken


def put_rows(table: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """See kernels.rows.put_rows. Raises ValueError for rows of the table with gaps."""
    if _side_by_side(table) is not table:
        raise ValueError("the numbers of a table's rows do not lie side by side")
    _run(False, table, numbers.contiguous(), rows.contiguous())


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """See kernels.rows.copy_rows."""
    kept, places = rows(target)
    if kept is not target:
        target.copy_(source)
        return
    _copy(source, places)


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """See kernels.rows.join."""
    widths = [part.shape[-1] for part in parts]
    joined = parts[0].new_empty(*parts[0].shape[:-1], sum(widths))
    at = joined.data_ptr()
    for part, width in zip(parts, widths, strict=True):
        _copy(part, (at, 1, 4 * joined.shape[-1], 0))
        at += 4 * width
    return joined


def _side_by_side(table: torch.Tensor) -> torch.Tensor:
    return table if table[:1].is_contiguous() else table.contiguous()


def _run(take: bool, table: torch.Tensor, numbers: torch.Tensor, others: torch.Tensor) -> None:
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    run_rows(
        _by_number(take),
        numbers.numel(),
        row_bytes // 4,
        table.data_ptr(),
        table.stride(0) * table.element_size(),
        numbers.data_ptr(),
        others.data_ptr(),
        row_bytes,
    )


def _copy(source: torch.Tensor, target: RowPlaces) -> None:
    width = source.shape[-1]
    if source.numel() == 0:
        return
    source, places = rows(source)
    run_rows(_from_places(), source.numel() // width, width, *places, *target, 4 * width)


@functools.cache
def _by_number(take: bool) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """Arguments: the table, bytes from row to row of it, the numbers, rows, bytes of a row."""
        table, step, numbers, others, row_bytes = args
        with code.loop(first, last) as i:
            numbered = table + code.load(numbers + i * 8, I64) * step
            other = others + i * row_bytes
            code.copy(*((other, numbered) if take else (numbered, other)), row_bytes)

    return Program(body, 5)


@functools.cache
def _from_places() -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """Arguments: source and target in RowPlaces, bytes of a row."""
        with code.loop(first, last) as row:
            code.copy(start(args[4:8], row), start(args[:4], row), args[8])

    return Program(body, 9)
