"""Several residual streams (hyper-connections, Zhu et al., arXiv 2409.19606): how one row is made
of them, and how a row is added to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import rows, run, sigmoid, silu, start, vectors
from kernels.pointwise.with_torch import pointwise


@operation(llvm=__name__)
def open_low(low: Tensor, n_streams: int, *, invariant: bool = False) -> Tensor:
    """silu(low / n_streams), between the two matrices of a gate.

    low: f32 [..., rank], any strides. Returns [..., rank]. Differentiable, as are the other two.

    invariant: each result has the same bits whatever its neighbours are.
    """
    return pointwise(functional.silu, low / n_streams, invariant=invariant)


@operation(llvm=__name__)
def mix_streams(x: Tensor, gate: Tensor, *, invariant: bool = False) -> Tensor:
    """The mean of x * sigmoid(gate) over the streams.

    x, gate: f32 [..., n_streams, d], the last two axes contiguous. Returns [..., d]. invariant: as
    above.
    """
    gate = pointwise(torch.sigmoid, gate, invariant=invariant)
    # one after the other: a sum over them all may take another order in another batch
    first, *others = (x * gate).unbind(-2)
    for other in others:
        first = first + other
    return first / x.shape[-2]


@operation(llvm=__name__)
def add_to_streams(x: Tensor, y: Tensor, gain: Tensor, *, invariant: bool = False) -> Tensor:
    """x + y times 2 sigmoid(gain / n_streams), each stream with a gain of its own.

    x: f32 [..., n_streams, d]; y: [..., d]; gain: [..., n_streams], any strides. Returns the shape
    of x. invariant: as above.
    """
    gain = 2 * pointwise(torch.sigmoid, gain / x.shape[-2], invariant=invariant)
    return x + y[..., None, :] * gain[..., None]


# The formulas as they read.


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def open_low_naive(low: Tensor, n_streams: int) -> Tensor:
    x = low / n_streams
    return x * _sigmoid(x)


def mix_streams_naive(x: Tensor, gate: Tensor) -> Tensor:
    return (x * _sigmoid(gate)).mean(-2)


def add_to_streams_naive(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    return x + 2 * _sigmoid(gain / x.shape[-2])[..., None] * y[..., None, :]


# Streams on a CPU: every number of them read once.


def open_low_with_llvm(low: Tensor, n_streams: int) -> Tensor:
    d, y = low.shape[-1], low.new_empty(*low.shape)
    low, places = rows(low)
    run(_open_program(d, n_streams), y.numel() // d, d, *places, y.data_ptr())
    return y


def mix_streams_with_llvm(x: Tensor, gate: Tensor) -> Tensor:
    *outer, n_streams, d = x.shape
    y = x.new_empty(*outer, d)
    x, x_rows = rows(x.flatten(-2))
    gate, gate_rows = rows(gate.flatten(-2))
    program = _mix_program(n_streams, d)
    run(program, y.numel() // d, d * n_streams, *x_rows, *gate_rows, y.data_ptr())
    return y


def add_to_streams_with_llvm(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    (n_streams, d), total = x.shape[-2:], x.new_empty(*x.shape)
    x, x_rows = rows(x)
    y, y_rows = rows(y)
    gain, gain_rows = rows(gain)
    places = *x_rows, *y_rows, *gain_rows, total.data_ptr()
    run(_add_program(n_streams, d), total.numel() // d, d, *places)
    return total


@kernel(5)
def _open_program(code: Code, args: Sequence[Value], row: Value, d: int, n_streams: int) -> None:
    """Arguments: the numbers in RowPlaces, the results."""
    source, target = start(args[:4], row), args[4] + row * (4 * d)
    for at, count in vectors(code, d):
        x = code.load_first(source + at, F32X16, count) / float(n_streams)
        code.store_first(silu(code, x), target + at, count)


@kernel(9)
def _mix_program(code: Code, args: Sequence[Value], row: Value, n_streams: int, d: int) -> None:
    """A task is one token. Arguments: streams and gates in RowPlaces, the means."""
    x, gate, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
    for at, count in vectors(code, d):
        total = code.variable(code.constant(F32X16, 0.0))
        with code.loop(0, code.integer(4 * d * n_streams), 4 * d) as stream:
            opened = sigmoid(code, code.load_first(gate + stream + at, F32X16, count))
            part = code.load_first(x + stream + at, F32X16, count) * opened
            total.set(total.value + part)
        code.store_first(total.value / float(n_streams), y + at, count)


@kernel(13)
def _add_program(code: Code, args: Sequence[Value], row: Value, n_streams: int, d: int) -> None:
    """A task is one stream of a token. Arguments: streams, rows and gains in RowPlaces, the
    sums."""
    token, stream = row // n_streams, row % n_streams
    x, y = start(args[:4], row), start(args[4:8], token)
    gain = code.splat(code.load(start(args[8:12], token) + stream * 4, F32))
    factor = sigmoid(code, gain / float(n_streams)) * 2.0
    target = args[12] + row * (4 * d)
    for at, count in vectors(code, d):
        added = code.load_first(y + at, F32X16, count) * factor
        code.store_first(code.load_first(x + at, F32X16, count) + added, target + at, count)
