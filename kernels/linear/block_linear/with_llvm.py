"""The product on a CPU, straight from the blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.linear.block_linear.operands_with_llvm import Arithmetic, arithmetic, operands, sizes
from kernels.linear.block_linear.rows_with_llvm import AHEAD, ROWS, multiply_rows
from kernels.llvm import F32X16, Code, Program, Value, panels
from kernels.llvm.panels import I32X16, LINE, PANEL, TOGETHER, WIDEST


def block_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: str,
    *,
    rounded: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.linear.block_linear.block_linear."""
    how, n_in, n_out = arithmetic(rounded=rounded), x.shape[-1], blocks.shape[0]
    rows = x.float().reshape(-1, n_in).contiguous()
    n_rows = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n_out)
    flat = y.view(n_rows, n_out)
    in_panels = n_out >= TOGETHER and n_in * how.size <= WIDEST
    if in_panels and (n_rows > ROWS or invariant):
        multiply_panels(rows, blocks, type, how, flat)
    elif n_rows <= ROWS:
        multiply_rows(rows, blocks, type, how, flat)
    else:
        for part, out in zip(rows.split(ROWS), flat.split(ROWS), strict=True):
            multiply_rows(part, blocks, type, how, out)
    return y


def multiply_panels(
    x: torch.Tensor, blocks: torch.Tensor, type: str, how: Arithmetic, y: torch.Tensor
) -> None:
    """y f32 [n, out] = x f32 [n, in] @ weight.T, out >= TOGETHER; all contiguous."""
    n_rows, n_in = x.shape
    n_out, row_bytes = blocks.shape
    n_panels, threads = -(-n_rows // PANEL), torch.get_num_threads()
    packed = torch.empty(n_panels * PANEL * n_in * how.size, dtype=torch.uint8)
    _pack_program(how)(
        x.data_ptr(), n_rows, n_in, packed.data_ptr(), tasks=n_panels, chunk=1, threads=threads
    )
    _program(type, panels.room_for(n_in * how.size), how)(
        blocks.data_ptr(),
        row_bytes,
        packed.data_ptr(),
        n_in,
        y.data_ptr(),
        n_out,
        n_rows,
        tasks=-(-n_out // TOGETHER),
        chunk=1,
        threads=threads,
    )


@functools.cache
def _pack_program(how: Arithmetic) -> Program:
    return Program(functools.partial(_pack, how), 4)


@functools.cache
def _program(type: str, room: int, how: Arithmetic) -> Program:
    return Program(functools.partial(_multiply, type, room, how), 7)


def _pack(how: Arithmetic, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    x, n_rows, n_in, out = args

    def load(row: Value, at: Value) -> Value:
        source = x + (row * n_in + at // how.size) * 4
        high = code.load(source + LINE, F32X16) if how.fused else None
        return how.operand(code, code.load(source, F32X16), high).bits(I32X16)

    with code.loop(first, last) as panel:
        panels.pack(code, panel, n_rows, n_in * how.size, out, load)


def _multiply(
    type: str,
    room: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    blocks, row_bytes, packed, n_in, y, n_out, n_rows = args
    elements, n_bytes = sizes(type)

    def write(row: Value, to: Value) -> None:
        with code.loop(0, n_in // elements) as b:
            block = blocks + row * row_bytes + b * n_bytes
            code.prefetch(block + AHEAD)
            for i, weights in enumerate(operands(code, type, block, how)):
                code.store(weights, to + b * (elements * how.size) + LINE * i)

    def add(total: Value, weight: Value, column: Value) -> Value:
        return how.add(code, total, how.read(weight), how.read(column))

    with code.loop(first, last) as tile:
        panels.multiply(
            code, tile, n_in * how.size, room, packed, n_rows, y, n_out, write=write, add=add
        )
