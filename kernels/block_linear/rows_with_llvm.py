"""Few rows of x: each weight row is decoded in registers and multiplied with all of them.

For one row this waits for memory alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from kernels.block_linear.arithmetic import Arithmetic
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
    threads = torch.get_num_threads()
    inputs = x.to(torch.bfloat16) if how.rounded else x
    if how.rounded and not how.fused:
        inputs = inputs.float()
    chunk = min(CHUNK, -(-n_out // (4 * threads)))
    _program(type, len(x), how)(
        blocks.data_ptr(), row_bytes, row_bytes // sizes(type)[1], inputs.data_ptr(), x.shape[1],
        y.data_ptr(), n_out, tasks=n_out, chunk=chunk, threads=threads,
    )  # fmt: skip


@functools.cache
def _program(type: str, n_rows: int, how: Arithmetic) -> Program:
    return Program(functools.partial(_body, type, n_rows, how), 7)


def _body(
    type: str,
    n_rows: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    blocks, row_bytes, n_blocks, x, n_in, y, n_out = args
    elements, n_bytes = sizes(type)
    zero = code.constant(F32X16, 0.0)
    # one row of weights at a time: two streams of memory would be slower than one
    with code.loop(first, last) as row:
        sums = [code.variable(zero) for _ in range(n_rows)]
        start = blocks + row * row_bytes
        with code.loop(0, n_blocks) as b:
            block = start + b * n_bytes
            inputs = [x + (n_in * r + b * elements) * how.size for r in range(n_rows)]
            code.prefetch(block + AHEAD)
            for i, weights in enumerate(operands(code, type, block, how)):
                for total, at in zip(sums, inputs, strict=True):
                    factor = how.load(code, at + i * how.step * how.size)
                    total.set(how.add(code, total.value, weights, factor))
        for r, total in enumerate(sums):
            code.store(code.sum(total.value), y + (n_out * r + row) * 4)


def operands(code: Code, type: str, block: Value, how: Arithmetic) -> Iterator[Value]:
    """The weights of a block as operands, in their order."""
    decoded = decode(code, type, block)
    if not how.fused:
        yield from (how.operand(code, weights) for weights in decoded)
        return
    for low in decoded:
        yield how.operand(code, low, next(decoded))
