"""Few rows of x: each weight row is decoded in registers and multiplied with all of them.

For one row this waits for memory alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from kernels.block_linear.arithmetic import Arithmetic
from kernels.block_linear.terms_with_llvm import GROUP, has_terms, terms
from kernels.dequant.decode_with_llvm import decode, sizes
from kernels.llvm import F32X16, Code, Program, Value

ROWS = 8
"""More rows of x than this many share no reading of the weights."""

# weight rows that a thread takes at a time
CHUNK = 256
# bytes; the processor's own prefetching starts anew with every row
AHEAD = 1024


def multiply_rows(
    x: torch.Tensor, blocks: torch.Tensor, type: str, how: Arithmetic, y: torch.Tensor
) -> None:
    """y f32 [n, out] = x f32 [n, in] @ weight.T, n <= ROWS; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads = torch.get_num_threads()
    inputs = x
    if how.rounded:
        inputs = torch.empty(_input_bytes(n_in, how) * n_rows, dtype=torch.uint8)
        _prepare(how)(x.data_ptr(), inputs.data_ptr(), n_in, tasks=n_rows, chunk=n_rows, threads=1)
    _program(type, n_rows, how)(
        blocks.data_ptr(), row_bytes, inputs.data_ptr(), n_in, y.data_ptr(), n_out,
        tasks=n_out, chunk=min(CHUNK, -(-n_out // (4 * threads))), threads=threads,
    )  # fmt: skip


@functools.cache
def _input_bytes(n_in: int, how: Arithmetic) -> int:
    """Of a row of x as a product reads it, sums of groups included."""
    return n_in * how.size + 4 * (n_in // GROUP)


@functools.cache
def _prepare(how: Arithmetic) -> Program:
    return Program(functools.partial(_prepare_body, how), 3)


@functools.cache
def _program(type: str, n_rows: int, how: Arithmetic) -> Program:
    body = _by_terms if how.fused and has_terms(type) else _by_numbers
    return Program(functools.partial(body, type, n_rows, how), 6)


def _prepare_body(
    how: Arithmetic, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Rows of x rounded, and behind each the sums of its groups."""
    x, out, n_in = args
    with code.loop(first, last) as r:
        start = out + r * _row_bytes(n_in, how)
        with code.loop(0, n_in, GROUP) as k:
            low, high = (code.load(x + (r * n_in + k) * 4 + at, F32X16) for at in (0, 64))
            rounded = [half.round_to_bf16().widen() for half in (low, high)]
            if how.fused:
                code.store(how.operand(code, low, high), start + k * 2)
            else:
                for i, half in enumerate(rounded):
                    code.store(half, start + k * 4 + 64 * i)
            code.store(code.sum(rounded[0] + rounded[1]), start + n_in * how.size + k // GROUP * 4)


def _row_bytes(n_in: Value, how: Arithmetic) -> Value:
    return n_in * how.size + n_in // GROUP * 4 if how.rounded else n_in * 4


def _by_numbers(
    type: str,
    n_rows: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Weights become numbers of the arithmetic before they are multiplied."""
    blocks, row_bytes, x, n_in, y, n_out = args
    elements, n_bytes = sizes(type)
    zero, input_bytes = code.constant(F32X16, 0.0), _row_bytes(n_in, how)
    # one row of weights at a time: two streams of memory would be slower than one
    with code.loop(first, last) as row:
        sums = [code.variable(zero) for _ in range(n_rows)]
        start = blocks + row * row_bytes
        with code.loop(0, n_in // elements) as b:
            block = start + b * n_bytes
            inputs = [x + input_bytes * r + b * (elements * how.size) for r in range(n_rows)]
            code.prefetch(block + AHEAD)
            for i, weights in enumerate(operands(code, type, block, how)):
                for total, at in zip(sums, inputs, strict=True):
                    factor = how.load(code, at + i * how.step * how.size)
                    total.set(how.add(code, total.value, weights, factor))
        for r, total in enumerate(sums):
            code.store(code.sum(total.value), y + (n_out * r + row) * 4)


def _by_terms(
    type: str,
    n_rows: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Whole numbers are multiplied, and every group's result with its scale."""
    blocks, row_bytes, x, n_in, y, n_out = args
    elements, n_bytes = sizes(type)
    zero, input_bytes = code.constant(F32X16, 0.0), _row_bytes(n_in, how)
    n_groups = elements // GROUP
    with code.loop(first, last) as row:
        sums = [code.variable(zero) for _ in range(n_rows)]
        # what the offsets take away
        lesses = [code.variable(zero.part(0, n_groups)) for _ in range(n_rows)]
        start = blocks + row * row_bytes
        with code.loop(0, n_in // elements) as b:
            block = start + b * n_bytes
            starts = [x + input_bytes * r for r in range(n_rows)]
            code.prefetch(block + AHEAD)
            parts, offsets = terms(code, type, block)
            for i, (weights, scale) in enumerate(parts):
                for total, at in zip(sums, starts, strict=True):
                    factor = how.load(code, at + b * (elements * 2) + 64 * i)
                    total.set(code.fma(how.add(code, zero, weights, factor), scale, total.value))
            if offsets is not None:
                for less, at in zip(lesses, starts, strict=True):
                    groups = code.load(at + n_in * 2 + b * (4 * n_groups), offsets.type)
                    less.set(code.fma(offsets, groups, less.value))
        for r, (total, less) in enumerate(zip(sums, lesses, strict=True)):
            result = code.sum(total.value) - code.sum(less.value)
            code.store(result, y + (n_out * r + row) * 4)


def operands(code: Code, type: str, block: Value, how: Arithmetic) -> Iterator[Value]:
    """The weights of a block as operands, in their order."""
    decoded = decode(code, type, block)
    if not how.fused:
        yield from (how.operand(code, weights) for weights in decoded)
        return
    for low in decoded:
        yield how.operand(code, low, next(decoded))
