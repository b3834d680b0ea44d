"""Many rows of x: weight rows are taken apart once and multiplied with all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.dequant.decode_with_llvm import sizes
from kernels.integer_blocks.activations_with_llvm import STRETCH
from kernels.integer_blocks.integers_with_llvm import F32X8, PER_STRETCH
from kernels.integer_blocks.panel_layout import (
    BYTE_ZERO,
    HALVES,
    LINE,
    OUTPUTS,
    TALL,
    VECTOR,
    WORD,
    panel,
)
from kernels.integer_blocks.panel_products_with_llvm import KEPT, Operands, products, write_starts
from kernels.integer_blocks.panel_rows_with_llvm import pack
from kernels.integer_blocks.panel_weights_with_llvm import WeightRows, write_panel
from kernels.llvm import F32, Code, Program, Value, vector
from kernels.llvm.values import I8
from kernels.processor import vnni_bits

# tiles of rows whose results stay in the cache while the stretches of a panel go by
TILES = 64


def multiply_panels(x: torch.Tensor, blocks: torch.Tensor, type: str, y: torch.Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] times the weight; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads, vnni = torch.get_num_threads(), vnni_bits() > 0
    packed = pack(x, panel(type, vnni=vnni))
    n_panels = -(-n_out // OUTPUTS)
    program(type, vnni=vnni)(
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


@functools.cache
def program(type: str, *, vnni: bool) -> Program:
    return Program(functools.partial(body, type, vnni), 7)


def body(
    type: str, vnni: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: blocks, bytes and numbers of a row, packed rows of x, how many, y, its width."""
    blocks, row_bytes, n_in, packed, n_rows, y, n_out = args
    how = panel(type, vnni=vnni)
    n_stretches = (n_in + (STRETCH - 1)) // STRETCH
    n_tiles = (n_rows + (TALL - 1)) // TALL
    tile_bytes = WORD * TALL * how.row_words
    matrix = WeightRows(blocks, row_bytes, n_in // sizes(type)[0], n_out - 1)
    weights, starts = code.stack(LINE * how.weight_words), code.stack(LINE * PER_STRETCH)
    kept = code.stack(KEPT)
    totals, zeros = code.stack(LINE * TALL * TILES), _zeros(code, WORD * how.integers)
    with code.loop(first, last) as task, code.loop(0, n_tiles, TILES) as start:
        end = code.smaller(start + TILES, n_tiles)
        with code.loop(0, (end - start) * (LINE * TALL), VECTOR) as at:
            code.store(code.constant(F32X8, 0.0), totals + at)
        with code.loop(0, n_stretches) as stretch:
            write_panel(code, type, how, matrix, task * OUTPUTS, stretch, weights)
            if how.starts:
                write_starts(code, how, Operands(weights, starts, zeros, 1))
            with code.loop(start, end) as tile:
                x = packed + (stretch * n_tiles + tile) * tile_bytes
                to = totals + (tile - start) * (LINE * TALL)
                for r, half, t in products(code, how, Operands(weights, starts, x), kept):
                    at = to + (LINE * r + VECTOR * half)
                    code.store(code.load(at, F32X8) + t, at)
        rows = code.smaller(end * TALL, n_rows) - start * TALL
        column = task * OUTPUTS
        to = y + (start * TALL * n_out + column) * 4
        _store(code, totals, rows, to, n_out, n_out - column)


def _zeros(code: Code, n_bytes: int) -> Value:
    """The address of so many bytes of integers of x that are 0."""
    zeros = code.stack(n_bytes)
    for at in range(0, n_bytes, VECTOR):
        code.store(code.constant(vector(I8, VECTOR), BYTE_ZERO), zeros + at)
    return zeros


def _store(
    code: Code, totals: Value, n_rows: Value, y: Value, n_out: Value, n_columns: Value
) -> None:
    """Rows of OUTPUTS results to rows of y, as far as there are columns."""
    with code.loop(0, n_rows) as row:
        source, to = totals + row * LINE, y + row * n_out * 4
        with code.when(code.integer(OUTPUTS - 1).less(n_columns)):
            for half in HALVES:
                code.store(code.load(source + VECTOR * half, F32X8), to + VECTOR * half)
        with code.when(n_columns.less(OUTPUTS)), code.loop(0, n_columns) as i:
            code.store(code.load(source + i * 4, F32), to + i * 4)
