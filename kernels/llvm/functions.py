"""Functions inside kernels: exp and what is made of it, on f32 or vectors of it, within a few units
in the last place; and rows of tensors: where one starts, its vectors, how they are shared out.

In the functions of numbers every element goes through the same operations, so its bits depend on
nothing but its value. NaN stays NaN. The coefficients are minimax fits of what the series leave
after their first terms.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from kernels.llvm.code import Code
from kernels.llvm.program import Program
from kernels.llvm.values import F32X16, I32, I64, Value, vector

# e^r = 1 + r + r^2 (c0 + c1 r + …) for |r| <= ln 2 / 2, to 2^-28
_EXP = (
    0.4999999403953552,
    0.1666651964187622,
    0.041668400168418884,
    0.00836885068565607,
    0.0013814320554956794,
)
# atanh(s) = s + s z (c0 + c1 z + …) with z = s^2 <= 1/9, to 2^-27
_ATANH = (0.3333320617675781, 0.20010852813720703, 0.13999506831169128, 0.14012570679187775)
# tanh(x) = x + x z (c0 + c1 z + …) with z = x^2 for |x| below _TANH_SMALL, to 2^-24 (Cephes)
_TANH = (-0.333332819422, 0.133314422036, -0.0537397155531, 0.0206390887954, -0.00570498872745)
_TANH_SMALL = 0.625
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first times a whole number below 2^9 is exact
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06
# beyond these, e^x rounds to zero and to infinity
_LOWEST, _HIGHEST = -104.0, 89.0
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
"""Added to a small number, it leaves the nearest integer in the last bits of the sum."""
_SIGN = -(2**31)
# below, x e^x rounds to zero
_SILU_IS_0 = -200.0


def exp(code: Code, x: Value) -> Value:
    """e^x, within 1 unit: infinity where it overflows, subnormals and zero where it underflows."""

    def full(value: float) -> Value:
        return code.constant(x.type, value)

    x = code.choose(x.less(_LOWEST), full(_LOWEST), x)
    x = code.choose(full(_HIGHEST).less(x), full(_HIGHEST), x)
    shifted = code.fma(x, full(_LOG2_E), full(ROUND))
    n = shifted - ROUND
    r = code.fma(n, full(-_LN2_LOW), code.fma(n, full(-_LN2_HIGH), x))
    series = code.fma(code.fma(_polynomial(code, r, _EXP), r, full(1.0)), r, full(1.0))
    # times 2^n in two steps, each by a normal number; the second rounds, where anything does
    plus_256 = _bits(shifted) - (ROUND_BITS - 256)
    half = plus_256 >> 1
    for exponent in (half - 1, plus_256 - half - 1):
        series *= (exponent << 23).bits(x.type)
    return series


def sigmoid(code: Code, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    e, one = _exp_of_minus_magnitude(code, x), code.constant(x.type, 1.0)
    return code.choose(x.less(0.0), e, one) / (e + 1.0)


def silu(code: Code, x: Value) -> Value:
    """x / (1 + e^-x); 0 for minus infinity."""
    x = code.choose(x.less(_SILU_IS_0), code.constant(x.type, _SILU_IS_0), x)
    e = _exp_of_minus_magnitude(code, x)
    return code.choose(x.less(0.0), x * e, x) / (e + 1.0)


def tanh(code: Code, x: Value) -> Value:
    """(e^x - e^-x) / (e^x + e^-x); small x keep their digits."""
    square, one = x * x, code.constant(x.type, 1.0)
    near = code.fma(x * square, _polynomial(code, square, _TANH), x)
    # e^-2|x| may round to zero, which leaves 1
    e = _exp_of_minus_magnitude(code, x + x)
    far = (one - e) / (one + e)
    far = code.choose(x.less(0.0), code.constant(x.type, 0.0) - far, far)
    return code.choose(square.less(_TANH_SMALL**2), near, far)


def softplus(code: Code, x: Value) -> Value:
    """ln(1 + e^x), which rounds to x from about 17 on."""
    e, zero = _exp_of_minus_magnitude(code, x), code.constant(x.type, 0.0)
    # ln(1 + e) = 2 atanh(e / (2 + e)); small e keep their digits
    twice = e / code.fma(e, code.constant(x.type, 0.5), code.constant(x.type, 1.0))
    square = twice * twice * 0.25
    logarithm = code.fma(twice * square, _polynomial(code, square, _ATANH), twice)
    return code.choose(x.less(zero), zero, x) + logarithm


def _exp_of_minus_magnitude(code: Code, x: Value) -> Value:
    return exp(code, (_bits(x) | _SIGN).bits(x.type))


def _bits(x: Value) -> Value:
    return x.bits(vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32)


def _polynomial(code: Code, x: Value, coefficients: Sequence[float]) -> Value:
    *lower, highest = (code.constant(x.type, c) for c in coefficients)
    total = highest
    for coefficient in reversed(lower):
        total = code.fma(total, x, coefficient)
    return total


LANES = F32X16.count
# this many numbers are done before a second thread has woken up
ALONE = 1 << 15


RowPlaces = tuple[int, int, int, int]
"""Arguments of a program: row r, of neighbours in memory, starts at
address + r // inner * outer + r % inner * step."""


def rows(x: Tensor) -> tuple[Tensor, RowPlaces]:
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


def addresses(*tensors: Tensor) -> list[int]:
    """Where their numbers lie, as arguments of a program; good for as long as they are kept."""
    return [x.data_ptr() for x in tensors]


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


Argument = int | Tensor | tuple[Tensor, ...] | None


def run(program: Program, n_rows: int, width: int, *args: Argument) -> None:
    """A task for every row of `width` numbers, on as many threads as are worth waking.

    args: of the program; a tensor is given by the address of its numbers side by side, None by 0,
    and tensors in a tuple by the RowPlaces of each.
    """
    kept: list[Tensor] = []
    places: list[int] = []
    for each in args:
        if isinstance(each, tuple):
            for x in each:
                whole, of_rows = rows(x)
                kept.append(whole)
                places += of_rows
        elif isinstance(each, int):
            places.append(each)
        elif each is None:
            places.append(0)
        else:
            if not each.is_contiguous():
                each = each.contiguous()
                kept.append(each)
            places.append(each.data_ptr())
    if n_rows * width <= ALONE:
        program.alone(n_rows, *places)
    else:
        chunk = max(1, ALONE // 4 // width)
        program(*places, tasks=n_rows, chunk=chunk, threads=torch.get_num_threads())


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


class StatePlace(NamedTuple):
    """Where rows of a state lie: the address of the first number, and the bytes from row to row."""

    start: Value
    row: Value


class StridedTensor(NamedTuple):
    """A tensor of 4-byte numbers as a program sees it; steps: its first strides, in bytes."""

    address: Value
    steps: Sequence[Value]

    def row(self, b: Value, t: Value, head: Value) -> Value:
        """Address of a row [d] of a tensor [B, T, H, d]."""
        return self.address + b * self.steps[0] + t * self.steps[1] + head * self.steps[2]

    def part(self, number: Value) -> StridedTensor:
        """That number of its first axis."""
        first, *steps = self.steps
        return StridedTensor(self.address + number * first, steps)

    def place(self, head: Value, first: Value) -> StatePlace:
        """Rows of a tensor [H, rows, columns] of which the first one begins after `first` bytes."""
        return StatePlace(self.address + head * self.steps[0] + first, self.steps[1])


class StateSlots:
    """Where the states of a sequence come from and go to: the address of each, and the same steps
    to its heads and rows for all.

    states: what they come from, one of each sequence. indexed: that is a pool, and rows of it are
    read and written. where: five arguments of a program, from `slot_table` or `slot_rows`.
    """

    def __init__(
        self, code: Code, states: StridedTensor, where: Sequence[Value], b: Value, indexed: bool
    ) -> None:
        self._code, self._states, self._where, self._b = code, states, where, b
        self._indexed = indexed
        number = code.load(where[0] + b * where[1] * 8, I64) if indexed else b
        self.begin = states.part(number)

    def slot(self, back: Value) -> StridedTensor:
        """The state `back` tokens before the last one."""
        if self._indexed:
            _, _, write, step, back_step = self._where
            at = write + self._b * step * 8 + back * back_step * 8
            return self._states.part(self._code.load(at, I64))
        table, *steps = self._where[:4]
        slot = StridedTensor(self._code.load(table + back * 8, I64), [step * 4 for step in steps])
        return slot.part(self._b)


def slot_table(slots: Sequence[Tensor]) -> tuple[tuple[int, ...], object]:
    """Tensors that receive states, newest first, for `StateSlots`, and what that points to. Raises
    ValueError where they are strided otherwise than alike, or numbers of a row lie apart."""
    strides = slots[0].stride()
    if any(slot.stride() != strides for slot in slots):
        raise ValueError("the slots of one call differ in their strides")
    check_rows(slots[0])
    table = array("q", [slot.data_ptr() for slot in slots])
    return (table.buffer_info()[0], *strides[:3], 0), table


def slot_rows(pool: Tensor, read: Tensor, write: Tensor) -> tuple[int, ...]:
    """Rows of a pool of states, for `StateSlots`. Raises ValueError for rows with gaps."""
    check_rows(pool)
    return read.data_ptr(), read.stride(0), write.data_ptr(), *write.stride()


def check_rows(x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError("the numbers of a state's rows do not lie side by side")


def rows_together(x: Tensor) -> Tensor:
    """x with the numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strided(*tensors: Tensor) -> list[int]:
    """The arguments for `strided_tensors`."""
    return [number for x in tensors for number in (x.data_ptr(), *x.stride()[:3])]


def stepped(x: Tensor, n_steps: int) -> list[int]:
    """The address of a tensor of 4-byte numbers and its first strides, in bytes."""
    return [x.data_ptr(), *(4 * step for step in x.stride()[:n_steps])]


def strided_tensors(args: Sequence[Value], count: int) -> Iterator[StridedTensor]:
    """The first `count` tensors among a program's arguments."""
    for i in range(0, 4 * count, 4):
        yield StridedTensor(args[i], [step * 4 for step in args[i + 1 : i + 4]])


def divisor(n: int, most: int) -> int:
    """The largest power of two that divides n, up to `most`."""
    return min(n & -n, most)
