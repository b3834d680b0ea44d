"""The product on a processor: the blocks are read once for up to ROWS rows of x."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.block_linear.decode_with_llvm import LANES, decode
from kernels.llvm import F32X16, Code, Program, Value

ROWS = 8
# weight rows that a thread takes at a time
CHUNK = 64
# bytes; the processor's own prefetching starts anew with every row
AHEAD = 1024


def block_linear(x: torch.Tensor, blocks: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.block_linear.block_linear."""
    rows = x.float().reshape(-1, x.shape[-1]).contiguous()
    y = torch.empty(len(rows), len(blocks))
    for start in range(0, len(rows), ROWS):
        _few(rows[start : start + ROWS], blocks, type, y[start : start + ROWS])
    return y.view(*x.shape[:-1], len(blocks))


def _few(x: torch.Tensor, blocks: torch.Tensor, type: str, y: torch.Tensor) -> None:
    n_out, row_bytes = blocks.shape
    n_blocks = row_bytes // _sizes(type)[1]
    _product(type, len(x))(
        blocks.data_ptr(), row_bytes, n_blocks, x.data_ptr(), x.shape[1], y.data_ptr(), n_out,
        tasks=n_out, chunk=CHUNK, threads=torch.get_num_threads(),
    )  # fmt: skip


def _sizes(type: str) -> tuple[int, int]:
    elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return elements, n_bytes


@functools.cache
def _product(type: str, n_rows: int) -> Program:
    return Program(functools.partial(_body, type, n_rows), 7)


def _body(
    type: str, n_rows: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    blocks, row_bytes, n_blocks, x, n_in, y, n_out = args
    elements, n_bytes = _sizes(type)
    zero = code.constant(F32X16, 0.0)
    # one row of weights at a time: two streams of memory would be slower than one
    with code.loop(first, last) as row:
        sums = [code.variable(zero) for _ in range(n_rows)]
        start = blocks + row * row_bytes
        with code.loop(0, n_blocks) as b:
            block, inputs = (
                start + b * n_bytes,
                [x + (n_in * r + b * elements) * 4 for r in range(n_rows)],
            )
            code.prefetch(block + AHEAD)
            for i, weights in enumerate(decode(code, type, block)):
                for total, at in zip(sums, inputs, strict=True):
                    total.set(code.fma(weights, code.load(at + 4 * LANES * i, F32X16), total.value))
        for r, total in enumerate(sums):
            code.store(code.sum(total.value), y + (n_out * r + row) * 4)
