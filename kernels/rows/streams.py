"""Residual streams: gates, one row out of the streams, and their mixture with another row; of
hyper-connections (Zhu et al., arXiv 2409.19606), and of four streams that are mixed by doubly
stochastic matrices (mHC, arXiv 2512.24880), as glm5-next and deepseek4 have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import exp, run, sigmoid, start, vectors
from kernels.pointwise.with_torch import pointwise

_TRITON = "kernels.rows.with_triton"

N_STREAMS = 4
"""Streams of a token; a matrix between them then fills a vector of 16 numbers."""
N_GATES = N_STREAMS * (N_STREAMS + 2)


@operation(triton=_TRITON, llvm=__name__)
def stream_gates(
    m: Tensor, scale: Tensor, base: Tensor, n_rounds: int, eps: float, *, invariant: bool = False
) -> Tensor:
    """What streams are weighed with, from a product of all of them.

    m: f32 [..., N_GATES], any strides; base: f32 [N_GATES]; scale: f32 [3]. Returns [..., N_GATES]:
    what a stream weighs in the row that is read, sigmoid(m scale[0] + base) + eps; what a stream
    gains of the row that is written, 2 sigmoid(m scale[1] + base); and row by row the matrix from
    streams to streams, m scale[2] + base made doubly stochastic. With N_STREAMS columns and [1]
    scale only the first. Differentiable, as are the other two.

    n_rounds: how often columns are divided by their sums; rows are, one time fewer, after a
    softmax. eps: added to gates and sums.
    invariant: each result has the same bits whatever its neighbours are.
    """
    n = N_STREAMS

    def opened(part: slice, factor: Tensor) -> Tensor:
        return pointwise(torch.sigmoid, m[..., part] * factor + base[part], invariant=invariant)

    read = opened(slice(n), scale[0]) + eps
    if m.shape[-1] == n:
        return read
    gain = 2 * opened(slice(n, 2 * n), scale[1])
    c = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    c = pointwise(torch.exp, c - c.amax(-1, keepdim=True), invariant=invariant)
    c = c / _sum(c, -1) + eps
    c = c / (_sum(c, -2) + eps)
    for _ in range(n_rounds - 1):
        c = c / (_sum(c, -1) + eps)
        c = c / (_sum(c, -2) + eps)
    return torch.cat((read, gain, c.flatten(-2)), -1)


@operation(triton=_TRITON, llvm=__name__)
def weigh_streams(x: Tensor, gates: Tensor) -> Tensor:
    """The sum of the streams, each times its gate.

    x: f32 [..., N_STREAMS, d], the last two axes contiguous; gates: [..., n], any strides, of which
    the first N_STREAMS count. Returns [..., d].
    """
    return _sum(x * gates[..., :N_STREAMS, None], -2).squeeze(-2)


@operation(triton=_TRITON, llvm=__name__)
def advance_streams(x: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    """The streams mixed by their matrix, with y times its gain added to each.

    x: f32 [..., N_STREAMS, d], the last two axes contiguous; y: [..., d]; gates: [..., N_GATES] of
    stream_gates. Returns the shape of x.
    """
    n = N_STREAMS
    total = gates[..., n : 2 * n, None] * y[..., None, :]
    for source in range(n):
        to = gates[..., (2 + source) * n : (3 + source) * n]
        total = total + to[..., None] * x[..., source : source + 1, :]
    return total


# The formulas as they read.


def stream_gates_naive(m: Tensor, scale: Tensor, base: Tensor, n_rounds: int, eps: float) -> Tensor:
    n = N_STREAMS
    read = 1 / (1 + torch.exp(-(m[..., :n] * scale[0] + base[:n]))) + eps
    if m.shape[-1] == n:
        return read
    gain = 2 / (1 + torch.exp(-(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])))
    c = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    c = c.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(n_rounds - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return torch.cat((read, gain, c.flatten(-2)), -1)


def weigh_streams_naive(x: Tensor, gates: Tensor) -> Tensor:
    return (x * gates[..., :N_STREAMS, None]).sum(-2)


def advance_streams_naive(x: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    n = N_STREAMS
    matrix = gates[..., 2 * n :].unflatten(-1, (n, n))
    return gates[..., n : 2 * n, None] * y[..., None, :] + matrix.transpose(-1, -2) @ x


# The formulas with sums in one order, whatever the batch.


def _sum(x: Tensor, dim: int) -> Tensor:
    a, b, c, d = x.unbind(dim)
    return ((a + b) + (c + d)).unsqueeze(dim)


# The formulas on a CPU: every number of the streams read once.


def stream_gates_with_llvm(
    m: Tensor, scale: Tensor, base: Tensor, n_rounds: int, eps: float
) -> Tensor:
    n, y = m.shape[-1], m.new_empty(*m.shape)
    program = _gates_program(n > N_STREAMS, n_rounds, eps)
    # some hundred operations a token
    run(program, y.numel() // n, 16 * n, (m,), scale, base, y)
    return y


def weigh_streams_with_llvm(x: Tensor, gates: Tensor) -> Tensor:
    *outer, n, d = x.shape
    y = x.new_empty(*outer, d)
    run(_weigh_program(d), y.numel() // d, d * n, (x.flatten(-2), gates), y)
    return y


def advance_streams_with_llvm(x: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    (n, d), total = x.shape[-2:], x.new_empty(*x.shape)
    given = x.flatten(-2), y, gates
    run(_advance_program(d), total.numel() // (n * d), n * d, given, total)
    return total


@kernel(7)
def _gates_program(
    code: Code, args: Sequence[Value], row: Value, with_matrix: bool, n_rounds: int, eps: float
) -> None:
    """A task is one token. Arguments: products in RowPlaces, scale, base, gates."""
    scale, base, gates = args[4:]
    n = N_STREAMS
    count = 2 * n if with_matrix else n
    zeros, ones = [0.0] * (16 - n), [1.0] * n

    def across(x: Value, join: str, *steps: int) -> Value:
        """In every lane the sum, or the maximum, of the lanes apart from it by these bits."""
        for step in steps:
            other = x.take([lane ^ step for lane in range(16)])
            x = x + other if join == "sum" else code.larger(x, other)
        return x

    source, target = start(args[:4], row), gates + row * (4 * (N_GATES if with_matrix else n))
    factor = code.splat(code.load(scale, F32))
    if with_matrix:
        second = code.splat(code.load(scale + 4, F32))
        factor = factor.take([*range(n), *range(16, 32 - n)], second)
    x = code.load_first(source, F32X16, count) * factor
    opened = sigmoid(code, x + code.load_first(base, F32X16, count))
    doubled = code.constants(F32X16, [*ones, *[2.0] * (16 - n)])
    added = code.constants(F32X16, [eps] * n + zeros)
    code.store_first(opened * doubled + added, target, count)
    if with_matrix:
        x = code.load(source + 8 * n, F32X16) * code.splat(code.load(scale + 8, F32))
        x = x + code.load(base + 8 * n, F32X16)
        e = exp(code, x - across(x, "maximum", 1, 2))
        c = e / across(e, "sum", 1, 2) + eps
        matrix = code.variable(c / (across(c, "sum", 4, 8) + eps))
        with code.loop(1, code.integer(n_rounds)):
            c = matrix.value / (across(matrix.value, "sum", 1, 2) + eps)
            matrix.set(c / (across(c, "sum", 4, 8) + eps))
        code.store(matrix.value, target + 8 * n)


@kernel(9)
def _weigh_program(code: Code, args: Sequence[Value], row: Value, d: int) -> None:
    """A task is one token. Arguments: streams and gates in RowPlaces, the sums."""
    x, gates, y = start(args[:4], row), start(args[4:8], row), args[8] + row * (4 * d)
    factors = [code.splat(code.load(gates + 4 * i, F32)) for i in range(N_STREAMS)]
    for at, count in vectors(code, d):
        total = code.constant(F32X16, 0.0)
        for i, factor in enumerate(factors):
            total = code.fma(code.load_first(x + at + 4 * d * i, F32X16, count), factor, total)
        code.store_first(total, y + at, count)


@kernel(13)
def _advance_program(code: Code, args: Sequence[Value], row: Value, d: int) -> None:
    """A task is one token. Arguments: streams, rows and gates in RowPlaces, the streams after."""
    n = N_STREAMS
    x, y, gates = (start(args[4 * i : 4 * i + 4], row) for i in range(3))
    target = args[12] + row * (4 * d * n)
    factors = [code.splat(code.load(gates + 4 * i, F32)) for i in range(n, N_GATES)]
    for at, count in vectors(code, d):
        added = code.load_first(y + at, F32X16, count)
        streams = [code.load_first(x + at + 4 * d * i, F32X16, count) for i in range(n)]
        for to in range(n):
            total = added * factors[to]
            for source, stream in enumerate(streams):
                total = code.fma(stream, factors[n * (1 + source) + to], total)
            code.store_first(total, target + at + 4 * d * to, count)


@operation(llvm=__name__)
def mix_streams(x: Tensor, gate: Tensor, *, invariant: bool = False) -> Tensor:
    """The mean of x * sigmoid(gate) over the streams.

    x, gate: f32 [..., n_streams, d], the last two axes contiguous. Returns [..., d].
    Differentiable. invariant: each result has the same bits whatever its neighbours are.
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
    of x. Differentiable. invariant: as above.
    """
    gain = 2 * pointwise(torch.sigmoid, gain / x.shape[-2], invariant=invariant)
    return x + y[..., None, :] * gain[..., None]


def mix_streams_naive(x: Tensor, gate: Tensor) -> Tensor:
    """The formula as it reads."""
    return (x * (1 / (1 + torch.exp(-gate)))).mean(-2)


def add_to_streams_naive(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    return x + 2 * torch.sigmoid(gain / x.shape[-2])[..., None] * y[..., None, :]


def mix_streams_with_llvm(x: Tensor, gate: Tensor) -> Tensor:
    *outer, n_streams, d = x.shape
    y = x.new_empty(*outer, d)
    given = x.flatten(-2), gate.flatten(-2)
    run(_mix_program(n_streams, d), y.numel() // d, d * n_streams, given, y)
    return y


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


def add_to_streams_with_llvm(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    (n_streams, d), total = x.shape[-2:], x.new_empty(*x.shape)
    run(_add_program(n_streams, d), total.numel() // d, d, (x, y, gain), total)
    return total


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
