"""The place of the largest value of a row, found without the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.dispatch import pick
from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.rows import LANES, rows, run, start


def argmax(x: torch.Tensor) -> torch.Tensor:
    """The lowest index of the largest value of every row.

    x: f32 [..., d] of numbers or -inf, any strides. Returns int64 [...], always within the row.
    """
    return _run(x)


def argmax_naive(x: torch.Tensor) -> torch.Tensor:
    """The largest value, looked for from the front."""
    places = [max(range(len(row)), key=row.__getitem__) for row in x.reshape(-1, x.shape[-1])]
    return torch.tensor(places, device=x.device).view(x.shape[:-1])


def argmax_with_torch(x: torch.Tensor) -> torch.Tensor:
    """The largest value through PyTorch."""
    # argmax promises no order among equal values, max does
    return x.max(-1).indices


def argmax_with_llvm(x: torch.Tensor) -> torch.Tensor:
    """The largest value on a CPU: first the value, then the first place that has it."""
    d, found = x.shape[-1], x.new_empty(x.shape[:-1], dtype=torch.int64)
    x, x_rows = rows(x)
    run(_program(d), found.numel(), d, *x_rows, found.data_ptr())
    return found


@functools.cache
def _program(d: int) -> Program:
    return Program(functools.partial(_body, d), 5)


def _body(d: int, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Arguments: x in RowPlaces, the places found."""
    whole = d - d % LANES
    with code.loop(first, last) as row:
        x = start(args[:4], row)
        best = code.variable(code.constant(F32, -float("inf")))
        if whole:
            most = code.variable(code.constant(F32X16, -float("inf")))
            with code.loop(0, code.integer(4 * whole), 4 * LANES) as at:
                most.set(code.larger(code.load(x + at, F32X16), most.value))
            best.set(code.maximum(most.value))
        for i in range(whole, d):
            best.set(code.larger(code.load(x + 4 * i, F32), best.value))
        place, top = code.variable(code.integer(0)), best.value

        def is_before(place: Value) -> Value:
            return place.less(d - 1) & code.load(x + place * 4, F32).less(top)

        with code.repeat(lambda: is_before(place.value)):
            place.set(place.value + 1)
        code.store(place.value, args[4] + row * 8)


_run = pick(argmax_naive, argmax_with_torch, None, argmax_with_llvm)
