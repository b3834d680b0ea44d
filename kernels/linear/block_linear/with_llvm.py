"""The product on a CPU, straight from the blocks; of many rows with some weight rows at a time and
all of x in panels.

In panels both sides are bytes, four of which are what one product takes of a row: an f32, or a pair
of bfloat16. x is packed beforehand, so that a vector holds the same four bytes of all rows of a
panel; a row's sums are formed in their order, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.linear.block_linear.operands_with_llvm import Arithmetic, arithmetic, operands, sizes
from kernels.linear.block_linear.rows_with_llvm import AHEAD, ROWS, multiply_rows
from kernels.llvm import F32X16, Code, Value, kernel
from kernels.llvm.values import I32, I32X16, transposed
from kernels.rows import side_by_side


def block_linear(
    x: Tensor, blocks: Tensor, type: str, *, rounded: bool = False, invariant: bool = False
) -> Tensor:
    how, n_in, n_out = arithmetic(rounded=rounded), x.shape[-1], blocks.shape[0]
    rows = side_by_side(x.float())
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


def multiply_panels(x: Tensor, blocks: Tensor, type: str, how: Arithmetic, y: Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] @ weight.T, out >= TOGETHER; all contiguous."""
    n_rows, n_in = x.shape
    n_out, row_bytes = blocks.shape
    n_panels, threads = -(-n_rows // PANEL), torch.get_num_threads()
    packed = torch.empty(n_panels * PANEL * n_in * how.size, dtype=torch.uint8)
    _pack_program(how)(
        x.data_ptr(), n_rows, n_in, packed.data_ptr(), tasks=n_panels, chunk=1, threads=threads
    )
    _program(type, room_for(n_in * how.size), how)(
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


@kernel(4)
def _pack_program(code: Code, args: Sequence[Value], panel: Value, how: Arithmetic) -> None:
    x, n_rows, n_in, out = args

    def load(row: Value, at: Value) -> Value:
        source = x + (row * n_in + at // how.size) * 4
        high = code.load(source + LINE, F32X16) if how.fused else None
        return how.operand(code, code.load(source, F32X16), high).bits(I32X16)

    pack(code, panel, n_rows, n_in * how.size, out, load)


@kernel(7)
def _program(
    code: Code, args: Sequence[Value], tile: Value, type: str, room: int, how: Arithmetic
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

    multiply(code, tile, n_in * how.size, room, packed, n_rows, y, n_out, write=write, add=add)


PANEL = 16
"""Rows of x in a panel."""
TOGETHER = 32
"""Weight rows that are prepared together; smaller matrices are not for this file."""
# panels and weight rows whose sums are in registers at the same time: many, because a processor
# begins a dozen products before the first is done
TILES = ((3, 8), (2, 8), (1, 16))
# bytes between prepared rows, against all of them falling into the same few lines of the cache
GAP = 64
WIDEST = 1 << 17
"""Bytes of the longest row that has room on the stack of a thread, TOGETHER of them."""

# bytes of a vector, and of what a product takes of a row
LINE, PART = 64, 4


def room_for(row_bytes: int) -> int:
    """Bytes of stack for a prepared row: one of few sizes, because each is compiled by itself."""
    room = 1 << 13
    while room < row_bytes:
        room *= 4
    return room


def pack(
    code: Code,
    panel: Value,
    n_rows: Value,
    row_bytes: Value,
    out: Value,
    load: Callable[[Value, Value], Value],
) -> None:
    """Writes a panel: [part][row]. Rows beyond x repeat the last.

    load(row, at): 64 bytes of a row of x from `at` on, as I32X16. row_bytes: whole lines.
    """
    rows = [code.smaller(panel * PANEL + r, n_rows - 1) for r in range(PANEL)]
    to = out + panel * row_bytes * PANEL
    with code.loop(0, row_bytes, LINE) as at:
        columns = transposed([load(row, at) for row in rows])
        for i, column in enumerate(columns):
            code.store(column, to + at * PANEL + LINE * i)


def multiply(
    code: Code,
    tile: Value,
    row_bytes: Value,
    room: int,
    packed: Value,
    n_rows: Value,
    y: Value,
    n_out: Value,
    *,
    write: Callable[[Value, Value], None],
    add: Callable[[Value, Value, Value], Value],
) -> None:
    """The results of TOGETHER weight rows: columns of y f32 [n_rows, n_out].

    row_bytes: whole lines. room: bytes that a prepared row has room for; known when the code is
    compiled, so that all rows are reached from one address. write(row, address): puts a
    weight row in memory.
    add(total, weight, column): adds products to f32 [16]; weight is one row's part everywhere,
    column that of every row of a panel, both I32X16.
    """
    stride = room + GAP
    prepared = code.stack(stride * TOGETHER)
    n_panels = (n_rows + (PANEL - 1)) // PANEL
    # the last tile reaches back, so that every tile is whole
    first = code.smaller(tile * TOGETHER, n_out - TOGETHER)
    with code.loop(0, code.integer(TOGETHER)) as r:
        write(first + r, prepared + r * stride)
    zero, begin = code.constant(F32X16, 0.0), code.integer(0)
    for wide, tall in TILES:
        end = n_panels - (n_panels - begin) % wide
        with code.loop(begin, end, wide) as panel, code.loop(0, code.integer(TOGETHER), tall) as r:
            columns = [packed + (panel + i) * row_bytes * PANEL for i in range(wide)]
            sums = [[code.variable(zero) for _ in range(tall)] for _ in columns]
            with code.loop(0, row_bytes, PART) as at:
                inputs = [code.load(column + at * PANEL, I32X16) for column in columns]
                for i in range(tall):
                    part = code.load(prepared + (r + i) * stride + at, I32)
                    weight = code.splat(part)
                    for totals, column in zip(sums, inputs, strict=True):
                        totals[i].set(add(totals[i].value, weight, column))
            for i, totals in enumerate(sums):
                results = [total.value for total in totals]
                _store(code, results, (panel + i) * PANEL, n_rows, y + (first + r) * 4, n_out)
        begin = end


def _store(
    code: Code, results: list[Value], first: Value, n_rows: Value, y: Value, n_out: Value
) -> None:
    """The results of a panel to y's rows from `first` on, as far as there are any."""
    tall = len(results)
    per_vector = PANEL // tall
    for i, outputs in enumerate(transposed(results)):
        for j in range(per_vector):
            row = first + (i * per_vector + j)
            with code.when(row.less(n_rows)):
                code.store(outputs.part(j * tall, tall), y + row * n_out * 4)
