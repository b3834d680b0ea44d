"""Operations on a GPU: every number read once, nothing in between written."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton.language as tl
from torch import Tensor

from kernels.pointwise import naive
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

TILE = 1024


@jit
def larger(least, x):
    # a comparison leaves NaN as it is
    return tl.where(x < least, least, x)


@jit
def smaller(most, x):
    return tl.where(x > most, most, x)


@jit
def silu(x):
    return x * tl.sigmoid(x)


@jit
def tanh(x):
    """Near zero by a series (Cephes), which keeps the digits of small x."""
    square = x * x
    series = ((-0.00570498872745 * square + 0.0206390887954) * square - 0.0537397155531) * square
    series = (series + 0.133314422036) * square - 0.333332819422
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(square < 0.390625, x + x * square * series, tl.where(x < 0, -far, far))


@jit
def softplus(x):
    """ln(1 + e^x), without an e^x that overflows; small ones keep their digits."""
    e = tl.exp(-tl.abs(x))
    whole = 1 + e
    # what rounding the sum took is put back (Kahan)
    logarithm = tl.where(whole == 1, e, tl.log(whole) * (e / tl.where(whole == 1, 1.0, whole - 1)))
    return tl.where(x < 0, 0.0, x) + logarithm


_NAMES = {
    "tl": tl,
    "softplus": softplus,
    "larger": larger,
    "smaller": smaller,
    "sigmoid": tl.sigmoid,
    "silu": silu,
    "tanh": tanh,
}


def _of_one(x, y, d, x_row, constants, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    value = expression(tl.load(x + row * x_row + column, inside, 0.0), *constants)  # type: ignore[name-defined]  # noqa: F821
    tl.store(y + row * d + column, value, inside)


def _of_two(a, b, y, d, a_row, b_row, constants, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    first = tl.load(a + row * a_row + column, inside, 0.0)
    second = tl.load(b + row * b_row + column, inside, 0.0)
    tl.store(y + row * d + column, expression(first, second, *constants), inside)  # type: ignore[name-defined]  # noqa: F821


EXPRESSIONS = {
    expression.__name__: jit(naive.in_terms_of(expression, _NAMES))
    for expression in (
        naive.relu2,
        naive.swiglu,
        naive.clamped_swiglu,
        naive.situ,
        naive.geglu,
        naive.multiply,
        naive.output_gate,
        naive.step_gates,
    )
}
"""What kernels of other operations have inside."""


STEP_GATES = EXPRESSIONS["step_gates"]


def _operation(expression: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An expression inside a kernel for as many operands; its constants come after them."""
    inner = EXPRESSIONS[expression.__name__]
    named = naive.in_terms_of(kernel, {"tl": tl, "expression": inner})
    assert isinstance(named, FunctionType)
    named.__qualname__ = f"_{expression.__name__}"  # what profilers show
    program, n_operands = jit(named), 1 if kernel is _of_one else 2

    def apply(*args: Any) -> Tensor:
        x, y = args[0], args[0].new_empty(args[0].shape)
        d, operands = x.shape[-1], [as_rows(each) for each in args[:n_operands]]
        strides = [each.stride(0) for each in operands]
        constants = tuple(None if c is None else float(c) for c in args[n_operands:])
        grid = operands[0].shape[0], cdiv(d, TILE)
        program[grid](*operands, y, d, *strides, constants, BD=TILE, num_warps=4)
        return y

    return apply


relu2 = _operation(naive.relu2, _of_one)
swiglu = _operation(naive.swiglu, _of_two)
clamped_swiglu = _operation(naive.clamped_swiglu, _of_two)
situ = _operation(naive.situ, _of_two)
geglu = _operation(naive.geglu, _of_two)


@jit
def _step_gates(step, dt, a, y, z, d, step_row, BD: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    inside = column < d
    x = tl.load(step + row * step_row + column, inside, 0.0)
    bias = tl.load(dt + column, inside, 0.0)
    size, g = STEP_GATES(x, bias, tl.load(a + column, inside, 0.0))
    tl.store(y + row * d + column, size, inside)
    tl.store(z + row * d + column, g, inside)


def step_gates(step: Tensor, dt: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    y, z = step.new_empty(2, *step.shape).unbind(0)
    rows, d = as_rows(step), step.shape[-1]
    constants = dt.contiguous(), a.contiguous()
    _step_gates[(len(rows),)](
        rows, *constants, y, z, d, rows.stride(0), BD=power_of_2(d), num_warps=4
    )
    return y, z
