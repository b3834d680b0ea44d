"""The sums on a processor: the rows of one token read twice, for their scores and to be added."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import exp
from kernels.llvm.rows import rows, run, start, vectors

# as kernels.rows.row_mixture.MOST_ROWS, and the row itself
_MOST = 1025


def mix_rows(
    x: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See kernels.rows.row_mixture.mix_rows. Raises ValueError for more rows than it takes."""
    d, n, y = x.shape[-1], others.shape[0], x.new_empty(*x.shape)
    if n >= _MOST:
        raise ValueError(f"{n} rows are more than {_MOST - 1}")
    x, x_rows = rows(x)
    others, weight = others.contiguous(), weight.contiguous()
    places = others.data_ptr(), others.stride(0) * 4, n, weight.data_ptr(), y.data_ptr()
    run(_program(d, eps), y.numel() // d, d * (n + 1), *x_rows, *places)
    return y


mix_rows_invariant = mix_rows


@functools.cache
def _program(d: int, eps: float) -> Program:
    return Program(functools.partial(_body, d, eps), 9)


def _body(d: int, eps: float, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: x in RowPlaces, the others, bytes from one of them to the next, their number, the
    weight, y."""
    others, apart, n, weight, target = args[4:]
    shares = code.stack(4 * _MOST)
    zero = code.constant(F32X16, 0.0)

    def score(row: Value) -> Value:
        squares, products = code.variable(zero), code.variable(zero)
        for at, count in vectors(code, d):
            part = code.load_first(row + at, F32X16, count)
            factor = code.load_first(weight + at, F32X16, count)
            squares.set(code.fma(part, part, squares.value))
            products.set(code.fma(part, factor, products.value))
        return code.sum(products.value) / code.sqrt(code.sum(squares.value) / float(d) + eps)

    with code.loop(first, last) as row:
        own, here = start(args[:4], row), others + row * (4 * d)
        of_own = score(own)
        most = code.variable(of_own)
        with code.loop(0, n) as i:
            found = score(here + i * apart)
            code.store(found, shares + i * 4)
            most.set(code.larger(found, most.value))
        share = exp(code, of_own - most.value)
        total = code.variable(share)
        with code.loop(0, n) as i:
            e = exp(code, code.load(shares + i * 4, F32) - most.value)
            code.store(e, shares + i * 4)
            total.set(total.value + e)
        whole, own_share = code.splat(total.value), code.splat(share)
        for at, count in vectors(code, d):
            mixed = code.variable(code.load_first(own + at, F32X16, count) * own_share)
            with code.loop(0, n) as i:
                part = code.load_first(here + i * apart + at, F32X16, count)
                factor = code.splat(code.load(shares + i * 4, F32))
                mixed.set(code.fma(part, factor, mixed.value))
            code.store_first(mixed.value / whole, target + row * (4 * d) + at, count)
