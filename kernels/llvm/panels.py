"""Products of many rows with a matrix: some weight rows at a time with all of x in panels.

Both sides are bytes, four of which are what one product takes of a row: an f32, or a pair of
bfloat16. x is packed beforehand, so that a vector holds the same four bytes of all
rows of a panel; a row's sums are formed in their order, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.llvm.code import Code
from kernels.llvm.values import F32X16, I32, Value, transposed, vector

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

I32X16 = vector(I32, 16)


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
