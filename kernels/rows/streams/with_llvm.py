"""Streams on a processor: every number of them read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid, silu
from kernels.llvm.rows import rows, run, start, vectors


def open_low(low: torch.Tensor, n_streams: int) -> torch.Tensor:
    """See kernels.rows.streams.open_low."""
    d, y = low.shape[-1], low.new_empty(*low.shape)
    low, places = rows(low)
    run(_open_program(d, n_streams), y.numel() // d, d, *places, y.data_ptr())
    return y


def mix_streams(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.streams.mix_streams."""
    *outer, n_streams, d = x.shape
    y = x.new_empty(*outer, d)
    x, x_rows = rows(x.flatten(-2))
    gate, gate_rows = rows(gate.flatten(-2))
    program = _mix_program(n_streams, d)
    run(program, y.numel() // d, d * n_streams, *x_rows, *gate_rows, y.data_ptr())
    return y


def add_to_streams(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.streams.add_to_streams."""
    (n_streams, d), total = x.shape[-2:], x.new_empty(*x.shape)
    x, x_rows = rows(x)
    y, y_rows = rows(y)
    gain, gain_rows = rows(gain)
    places = *x_rows, *y_rows, *gain_rows, total.data_ptr()
    run(_add_program(n_streams, d), total.numel() // d, d, *places)
    return total


open_low_invariant = open_low
mix_streams_invariant = mix_streams
add_to_streams_invariant = add_to_streams


@functools.cache
def _open_program(d: int, n_streams: int) -> Program:
    return Program(functools.partial(_open_body, d, n_streams), 5)


def _open_body(
    d: int, n_streams: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: the numbers in RowPlaces, the results."""
    with code.loop(first, last) as row:
        source, target = start(args[:4], row), args[4] + row * (4 * d)
        for at, count in vectors(code, d):
            x = code.load_first(source + at, F32X16, count) / float(n_streams)
            code.store_first(silu(code, x), target + at, count)


@functools.cache
def _mix_program(n_streams: int, d: int) -> Program:
    return Program(functools.partial(_mix_body, n_streams, d), 9)


def _mix_body(
    n_streams: int, d: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """A task is one token. Arguments: streams and gates in RowPlaces, the means."""
    with code.loop(first, last) as row:
        x, gate, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
        for at, count in vectors(code, d):
            total = code.variable(code.constant(F32X16, 0.0))
            with code.loop(0, code.integer(4 * d * n_streams), 4 * d) as stream:
                opened = sigmoid(code, code.load_first(gate + stream + at, F32X16, count))
                part = code.load_first(x + stream + at, F32X16, count) * opened
                total.set(total.value + part)
            code.store_first(total.value / float(n_streams), y + at, count)


@functools.cache
def _add_program(n_streams: int, d: int) -> Program:
    return Program(functools.partial(_add_body, n_streams, d), 13)


def _add_body(
    n_streams: int, d: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """A task is one stream of a token. Arguments: streams, rows and gains in RowPlaces, the
    sums."""
    with code.loop(first, last) as row:
        token, stream = row // n_streams, row % n_streams
        x, y = start(args[:4], row), start(args[4:8], token)
        gain = code.splat(code.load(start(args[8:12], token) + stream * 4, F32))
        factor = sigmoid(code, gain / float(n_streams)) * 2.0
        target = args[12] + row * (4 * d)
        for at, count in vectors(code, d):
            added = code.load_first(y + at, F32X16, count) * factor
            code.store_first(code.load_first(x + at, F32X16, count) + added, target + at, count)
