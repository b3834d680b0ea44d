"""The integer products on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.block_parts import SHORT
from kernels.linear.integer_blocks.activations_with_llvm import PER_STRETCH, STRETCH
from kernels.linear.integer_blocks.panel_layout import HALVES, WORD, Panel, panel
from kernels.linear.integer_blocks.panel_products_with_llvm import Operands, products, write_starts
from kernels.linear.integer_blocks.panel_weights_with_llvm import WeightRows, pack, write_panel
from kernels.linear.integer_blocks.rows_with_llvm import MOST, MOST_OF, multiply_rows
from kernels.linear.packed import BYTE_ZERO
from kernels.llvm import F32, Code, Value, kernel, vector
from kernels.llvm.values import I8
from kernels.processor import vnni_bits
from kernels.rows import side_by_side


def integer_linear(x: Tensor, blocks: Tensor, type: str) -> Tensor:
    rows, n_out = side_by_side(x), blocks.shape[0]
    n_rows = rows.shape[0]
    y = torch.empty(*x.shape[:-1], n_out)
    to = y.view(n_rows, n_out)
    if n_rows > MOST_OF.get(type, MOST):
        multiply_panels(rows, blocks, type, to)
    elif n_rows:
        multiply_rows(rows, blocks, type, to)
    return y


# rows whose results stay in the cache while the stretches of a panel go by
CACHED = 256


def multiply_panels(x: Tensor, blocks: Tensor, type: str, y: Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] times the weight; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads, vnni = torch.get_num_threads(), vnni_bits()
    how = panel(type, vnni=vnni)
    packed = pack(x, how)
    n_panels = -(-n_out // how.outputs)
    program(type, vnni)(
        blocks.data_ptr(),
        row_bytes,
        n_in,
        packed.data_ptr(),
        n_rows,
        y.data_ptr(),
        n_out,
        tasks=n_panels,
        chunk=max(1, n_panels // (8 * threads)),
        threads=threads,
    )


@kernel(7)
def program(code: Code, args: Sequence[Value], task: Value, type: str, vnni: int) -> None:
    """Arguments: blocks, bytes and numbers of a row, packed rows of x, how many, y, its width."""
    blocks, row_bytes, n_in, packed, n_rows, y, n_out = args
    how = panel(type, vnni=vnni)
    n_stretches = (n_in + (STRETCH - 1)) // STRETCH
    tall, line, vector_bytes = how.tall, how.line, how.vector_bytes
    n_tiles, tiles = (n_rows + (tall - 1)) // tall, CACHED // tall
    matrix = WeightRows(type, how, blocks, row_bytes, n_in // SHORT, n_out - 1)
    weights, starts = code.stack(line * how.weight_words), code.stack(line * how.groups)
    kept = code.stack(line * tall * PER_STRETCH)
    nothing = code.constant(vector(F32, how.width), 0.0)
    totals, zeros = code.stack(line * CACHED), _zeros(code, WORD * how.integers)
    with code.loop(0, n_tiles, tiles) as start:
        end = code.smaller(start + tiles, n_tiles)
        with code.loop(0, (end - start) * (line * tall), vector_bytes) as at:
            code.store(nothing, totals + at)
        with code.loop(0, n_stretches) as stretch:
            write_panel(code, matrix, task * how.outputs, stretch, weights)
            if how.starts:
                write_starts(code, how, Operands(how, weights, starts, zeros, 1))
            with code.loop(start, end) as tile:
                x = packed + (stretch * n_tiles + tile) * how.tile_bytes
                to = totals + (tile - start) * (line * tall)
                operands = Operands(how, weights, starts, x, tall)
                for r, half, t in products(code, how, operands, kept):
                    at = to + (line * r + vector_bytes * half)
                    code.store(code.load(at, t.type) + t, at)
        rows = code.smaller(end * tall, n_rows) - start * tall
        column = task * how.outputs
        to = y + (start * tall * n_out + column) * 4
        _store(code, how, totals, rows, to, n_out, n_out - column)


def _zeros(code: Code, n_bytes: int) -> Value:
    """The address of this many bytes of integers of x that are 0."""
    zeros = code.stack(n_bytes)
    zero = code.constant(vector(I8, 32), BYTE_ZERO)
    for at in range(0, n_bytes, zero.type.count):
        code.store(zero, zeros + at)
    return zeros


def _store(
    code: Code, panel: Panel, totals: Value, n_rows: Value, y: Value, n_out: Value, n_columns: Value
) -> None:
    """Rows of a panel's results to rows of y, as far as there are columns."""
    results = vector(F32, panel.width)
    with code.loop(0, n_rows) as row:
        source, to = totals + row * panel.line, y + row * n_out * 4
        with code.when(code.integer(panel.outputs - 1).less(n_columns)):
            for half in HALVES:
                at = panel.vector_bytes * half
                code.store(code.load(source + at, results), to + at)
        with code.when(n_columns.less(panel.outputs)), code.loop(0, n_columns) as i:
            code.store(code.load(source + i * 4, F32), to + i * 4)
