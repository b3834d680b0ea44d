"""Many rows of x: some weight rows are decoded once and multiplied with all of x in panels.

x is packed beforehand, so that one operand holds the same element (or pair of bfloat16) of all
rows of a panel. A row's sums are formed in the order of the elements, whatever stands beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.block_linear.arithmetic import I32X16, Arithmetic
from kernels.block_linear.rows_with_llvm import AHEAD, operands
from kernels.dequant.decode_with_llvm import sizes
from kernels.llvm import F32X16, Code, Program, Value, transposed

PANEL = 16
"""Rows of x in a panel."""
DECODED = 32
"""Weight rows that are decoded together; smaller matrices are not for this file."""
# panels and weight rows whose sums are in registers at the same time: many, because a processor
# begins a dozen products before the first is done
TILES = ((3, 8), (2, 8), (1, 16))
# bytes between decoded rows, against all of them falling into the same few lines of the cache
GAP = 64


def multiply_panels(
    x: torch.Tensor, blocks: torch.Tensor, type: str, how: Arithmetic, y: torch.Tensor
) -> None:
    """y f32 [n, out] = x f32 [n, in] @ weight.T, out >= DECODED; all contiguous."""
    n_rows, n_in = x.shape
    n_out, row_bytes = blocks.shape
    n_panels, threads = -(-n_rows // PANEL), torch.get_num_threads()
    packed = torch.empty(n_panels * PANEL * n_in * how.size, dtype=torch.uint8)
    _pack_program(how)(
        x.data_ptr(), n_rows, n_in, packed.data_ptr(), tasks=n_panels, chunk=1, threads=threads
    )
    _program(type, n_in, how)(
        blocks.data_ptr(), row_bytes, packed.data_ptr(), y.data_ptr(), n_out, n_rows, n_panels,
        tasks=-(-n_out // DECODED), chunk=1, threads=threads,
    )  # fmt: skip


@functools.cache
def _pack_program(how: Arithmetic) -> Program:
    return Program(functools.partial(_pack, how), 4)


@functools.cache
def _program(type: str, n_in: int, how: Arithmetic) -> Program:
    return Program(functools.partial(_multiply, type, n_in, how), 7)


def _pack(how: Arithmetic, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    """Panels of x as operands: [panel][element or pair][row]. Rows beyond x repeat the last."""
    x, n_rows, n_in, out = args
    with code.loop(first, last) as panel:
        starts = [x + code.smaller(panel * PANEL + r, n_rows - 1) * n_in * 4 for r in range(PANEL)]
        to = out + panel * n_in * (PANEL * how.size)
        with code.loop(0, n_in, how.step) as k:
            rows = []
            for start in starts:
                at = start + k * 4
                high = code.load(at + 64, F32X16) if how.fused else None
                rows.append(how.operand(code, code.load(at, F32X16), high).bits(I32X16))
            for i, column in enumerate(transposed(rows)):
                code.store(column, to + k * (PANEL * how.size) + 64 * i)


def _multiply(
    type: str,
    n_in: int,
    how: Arithmetic,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    blocks, row_bytes, packed, y, n_out, n_rows, n_panels = args
    # known when the code is compiled, so that all rows are reached from one address
    stride = n_in * how.size + GAP
    scratch = code.stack(stride * DECODED)
    with code.loop(first, last) as tile:
        # the last tile reaches back, so that every tile is whole
        row = code.smaller(tile * DECODED, n_out - DECODED)
        with code.loop(0, code.integer(DECODED)) as r:
            start = blocks + (row + r) * row_bytes
            _decode(code, type, n_in, how, start, scratch + r * stride)
        begin = code.integer(0)
        for wide, tall in TILES:
            end = n_panels - (n_panels - begin) % wide
            with (
                code.loop(begin, end, wide) as panel,
                code.loop(0, code.integer(DECODED), tall) as r,
            ):
                columns = [packed + (panel + i) * (n_in * PANEL * how.size) for i in range(wide)]
                sums = _tile(code, n_in, how, columns, scratch + r * stride, stride, tall)
                for i, part in enumerate(sums):
                    _store(code, part, (panel + i) * PANEL, n_rows, y + (row + r) * 4, n_out)
            begin = end


def _decode(code: Code, type: str, n_in: int, how: Arithmetic, start: Value, to: Value) -> None:
    """A weight row as operands."""
    elements, n_bytes = sizes(type)
    with code.loop(0, code.integer(n_in // elements)) as b:
        block = start + b * n_bytes
        code.prefetch(block + AHEAD)
        for i, weights in enumerate(operands(code, type, block, how)):
            code.store(weights, to + b * (elements * how.size) + 64 * i)


def _tile(
    code: Code,
    n_in: int,
    how: Arithmetic,
    columns: list[Value],
    rows: Value,
    stride: int,
    tall: int,
) -> list[list[Value]]:
    """The sums of `tall` weight rows with some panels: [panel][weight row], each over x's rows."""
    zero = code.constant(F32X16, 0.0)
    sums = [[code.variable(zero) for _ in range(tall)] for _ in columns]
    # an operand's places hold 4 bytes each: an element, or a pair
    with code.loop(0, code.integer(n_in * how.size), 4) as at:
        inputs = [how.load(code, column + at * PANEL) for column in columns]
        for r in range(tall):
            weight = how.load_everywhere(code, rows + at + r * stride)
            for part, factor in zip(sums, inputs, strict=True):
                part[r].set(how.add(code, part[r].value, weight, factor))
    return [[total.value for total in part] for part in sums]


def _store(
    code: Code, sums: list[Value], first: Value, n_rows: Value, y: Value, n_out: Value
) -> None:
    """The sums of a panel to y's rows from `first` on, as far as there are any."""
    tall = len(sums)
    per_vector = PANEL // tall
    for i, outputs in enumerate(transposed(sums)):
        for j in range(per_vector):
            row = first + (i * per_vector + j)
            with code.when(row.less(n_rows)):
                code.store(outputs.part(j * tall, tall), y + row * n_out * 4)
