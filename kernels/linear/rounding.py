"""Rounding of numbers to those of a shorter type, kept as float32: to the nearest, ties to the even
one, above the largest float16 to infinity; and rows divided by their largest magnitude, as they are
rounded to integers of 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32X16, Code, Value, kernel
from kernels.llvm.functions import rows, run, start, vectors
from kernels.llvm.values import I64

# Rounding by PyTorch's casts.
_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@operation(llvm=__name__)
def rounded(x: Tensor, type: str) -> Tensor:
    """x f32 [..., d], any strides, as the numbers that `type`, "bf16" or "f16", holds: f32, new
    memory of the same shape."""
    return x.to(_TYPES[type]).to(x.dtype)


@operation(llvm=__name__)
def round_in_place(x: Tensor, type: str) -> None:
    """`rounded` in the memory of x."""
    x.copy_(torch_version(rounded)(x, type))


@operation(llvm=__name__)
def round_rows(table: Tensor, numbers: Tensor, type: str) -> None:
    """`rounded` for rows of a table f32 [n, *row], each contiguous. numbers: int64, any shape,
    0 .. n - 1, not looked at by the host. The other rows keep their bits."""
    table[numbers] = torch_version(rounded)(table[numbers], type)


# Rounding on a CPU: a task rounds one row.
_ROUND = {"bf16": Value.rounded_to_bf16, "f16": Value.rounded_to_f16}


def rounded_with_llvm(x: Tensor, type: str) -> Tensor:
    new = x.new_empty(*x.shape)
    _run(x, new, type)
    return new


def round_in_place_with_llvm(x: Tensor, type: str) -> None:
    _run(x, x, type)


def round_rows_with_llvm(table: Tensor, numbers: Tensor, type: str) -> None:
    """See round_rows. Raises ValueError for rows of the table with gaps."""
    if not table[:1].is_contiguous():
        raise ValueError("the numbers of a table's rows do not lie side by side")
    width, places = math.prod(table.shape[1:]), (table.data_ptr(), 4 * table.stride(0))
    run(_by_number(width, type), numbers.numel(), width, *places, numbers)


def _run(x: Tensor, target: Tensor, type: str) -> None:
    width = x.shape[-1]
    kept, to = rows(target)
    if kept is not target:  # strides that no two steps reach
        target.copy_(rounded_with_llvm(x, type))
        return
    run(_from_places(width, type), x.numel() // width, width, (x,), *to)


@kernel(8)
def _from_places(code: Code, args: Sequence[Value], row: Value, width: int, type: str) -> None:
    """Arguments: source and target in RowPlaces, which may be the same."""
    _round(code, width, type, start(args[:4], row), start(args[4:8], row))


@kernel(3)
def _by_number(code: Code, args: Sequence[Value], i: Value, width: int, type: str) -> None:
    """Arguments: the table, bytes from row to row of it, the numbers."""
    table, step, numbers = args
    place = table + code.load(numbers + i * 8, I64) * step
    _round(code, width, type, place, place)


def _round(code: Code, width: int, type: str, source: Value, target: Value) -> None:
    for at, count in vectors(code, width):
        x = code.load_first(source + at, F32X16, count)
        code.store_first(_ROUND[type](x), target + at, count)


# Rows by their largest magnitude.
SUMS = 4
"""Maxima formed at a time: each waits for the one before."""


@operation(llvm=__name__)
def max_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / max(|x|) over the last axis, and these largest magnitudes.

    x: f32 [..., d]. Returns [..., d] and [..., 1]; the largest magnitude counts as the smallest
    normal number at least, so that a row of zeros stays zero.
    """
    # the infinity norm would be one operation less and up to twenty times slower
    largest = x.abs().amax(-1, True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x / largest, largest


def max_norm_naive(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().max(-1, keepdim=True).values.clamp(min=torch.finfo(x.dtype).tiny)
    return x / largest, largest


def max_norm_with_llvm(x: Tensor) -> tuple[Tensor, Tensor]:
    d, y = x.shape[-1], x.new_empty(*x.shape)
    largest = x.new_empty(*x.shape[:-1], 1)
    run(_max_program(d), largest.numel(), d, (x,), y, largest)
    return y, largest


@kernel(6)
def _max_program(code: Code, args: Sequence[Value], row: Value, d: int) -> None:
    """Arguments: x in RowPlaces, y, the largest magnitudes."""
    *x, y, maxima = args
    tiny = code.constant(F32X16, torch.finfo(torch.float32).tiny)
    source, target = start(x, row), y + row * (4 * d)
    most = [code.variable(tiny) for _ in range(SUMS)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        part = code.load_first(source + at, F32X16, count)
        magnitude, so_far = code.call("llvm.fabs.v16f32", F32X16, part), most[i % SUMS]
        so_far.set(code.larger(magnitude, so_far.value))
    a, b, c, e = (so_far.value for so_far in most)
    largest = code.maximum(code.larger(code.larger(a, b), code.larger(c, e)))
    code.store(largest, maxima + row * 4)
    divisor = code.splat(largest)
    for at, count in vectors(code, d):
        code.store_first(code.load_first(source + at, F32X16, count) / divisor, target + at, count)
