"""Rounding on a processor: a task rounds one row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from kernels.llvm import F32X16, Code, Program, Value
from kernels.llvm.rows import rows, run, start, vectors
from kernels.llvm.values import I64

_ROUND = {"bf16": Value.rounded_to_bf16, "f16": Value.rounded_to_f16}


def rounded(x: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.linear.rounding.rounded."""
    new = x.new_empty(*x.shape)
    _run(x, new, type)
    return new


def round_in_place(x: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_in_place."""
    _run(x, x, type)


def round_rows(table: torch.Tensor, numbers: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_rows. Raises ValueError for rows of the table with gaps."""
    if not table[:1].is_contiguous():
        raise ValueError("the numbers of a table's rows do not lie side by side")
    width, numbers = math.prod(table.shape[1:]), numbers.contiguous()
    step = 4 * table.stride(0)
    run(_by_number(width, type), numbers.numel(), width, table.data_ptr(), step, numbers.data_ptr())


def _run(x: torch.Tensor, target: torch.Tensor, type: str) -> None:
    width = x.shape[-1]
    kept, to = rows(target)
    if kept is not target:  # strides that no two steps reach
        target.copy_(rounded(x, type))
        return
    x, places = rows(x)
    run(_from_places(width, type), x.numel() // width, width, *places, *to)


@functools.cache
def _from_places(width: int, type: str) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """Arguments: source and target in RowPlaces, which may be the same."""
        with code.loop(first, last) as row:
            _round(code, width, type, start(args[:4], row), start(args[4:8], row))

    return Program(body, 8)


@functools.cache
def _by_number(width: int, type: str) -> Program:
    def body(code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
        """Arguments: the table, bytes from row to row of it, the numbers."""
        table, step, numbers = args
        with code.loop(first, last) as i:
            place = table + code.load(numbers + i * 8, I64) * step
            _round(code, width, type, place, place)

    return Program(body, 3)


def _round(code: Code, width: int, type: str, source: Value, target: Value) -> None:
    for at, count in vectors(code, width):
        x = code.load_first(source + at, F32X16, count)
        code.store_first(_ROUND[type](x), target + at, count)
