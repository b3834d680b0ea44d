"""Few rows of x: each weight row is taken apart in registers and multiplied with all of them.

Where AVX512 is worth it, two neighbouring stretches of a weight row are taken apart together, one
in each half of a vector. Two weight rows side by side would be slower: they are two streams of
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.block_parts import GROUP
from kernels.linear.decode_with_llvm import sizes
from kernels.linear.integer_blocks.activations_with_llvm import (
    LINE,
    PER_STRETCH,
    STRETCH,
    Layout,
    write_rows,
)
from kernels.linear.integer_blocks.integers_with_llvm import BYTES, long_blocks, short_blocks
from kernels.linear.integer_blocks.row_products_with_llvm import (
    RowVectors,
    added,
    dot_products,
    halves,
    lane_scales,
    layout_for,
    pair_sums,
    sums,
)
from kernels.llvm import F32, Code, Program, Value, vector
from kernels.llvm.values import I8, I16, I64
from kernels.processor import halves_512_bits, reads_ahead_into_second_cache, vnni_bits

ROWS = 8
"""More rows of x are multiplied in parts, weight row by weight row: what is read from memory once
is taken apart again for each."""
MOST, MOST_OF = 16, {"Q8_0": 24}
"""Up to how many rows, by type where it is another number, that is faster than panels: weights that
are in no cache took 1.02 to 1.7 times less for 9 to 16, Q8_0 0.98 to 1.26 times less for 17 to 24
(Intel Xeon, with AVX2 alone and with VNNI)."""
# weight rows that a thread takes at a time
CHUNK = 256
# bytes, in the nearest cache; the CPU's own prefetching starts anew with every row
AHEAD = 8192
# bytes, in the second cache: for what is read faster than the nearest one can wait for. An Intel
# Xeon read Q8_0 at 23 to 24 GB/s instead of 19 to 20 for one row, 21 instead of 20 for four
FAST, FAST_ROWS, FAST_AHEAD = ("Q8_0",), 4, 4096
# bytes of weights times rows that are done before a second thread has woken up
ALONE = 1 << 16


def multiply_rows(x: Tensor, blocks: Tensor, type: str, y: Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] times the weight, few rows; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads = torch.get_num_threads()
    run, n_bytes = _prepared(type, n_rows, n_in)
    rows = torch.empty(n_bytes, dtype=torch.uint8)
    args = (x.data_ptr(), n_in, rows.data_ptr(), blocks.data_ptr(), row_bytes, y.data_ptr(), n_out)
    if threads == 1 or blocks.numel() * n_rows <= ALONE:
        run.alone(n_out, *args)
    else:
        run(*args, tasks=n_out, chunk=min(CHUNK, -(-n_out // (4 * threads))), threads=threads)


@functools.cache
def _prepared(type: str, n_rows: int, n_in: int) -> tuple[Program, int]:
    """The program, and the bytes of its quantised rows."""
    vnni = vector_bits()
    n_bytes = sum(one.tile_bytes(-(-n_in // STRETCH)) for one in _layouts(type, n_rows, vnni))
    return program(type, n_rows, vnni=vnni), n_bytes


def _layouts(type: str, n_rows: int, vnni: int) -> list[Layout]:
    """Layouts for nearly equal parts of the rows, at most ROWS each, the larger ones first."""
    n_parts = -(-n_rows // ROWS)
    sizes_ = [(n_rows + i) // n_parts for i in reversed(range(n_parts))]
    return [layout_for(type, n, vnni=vnni) for n in sizes_]


def vector_bits() -> int:
    """kernels.processor.vnni_bits, but 256 if wide vectors are computed in halves."""
    return min(vnni_bits(), 8 * BYTES) if halves_512_bits() else vnni_bits()


@functools.cache
def program(type: str, n_rows: int, *, vnni: int) -> Program:
    """Arguments: x, how long its rows are, room for them quantised, blocks, bytes of a row of
    them, y, rows of weights."""
    body = functools.partial(write, type, n_rows, vnni)
    # one call for both: rows are ready before other threads have woken up
    return Program(body, 7, functools.partial(_quantise, _layouts(type, n_rows, vnni)))


def _quantise(layouts: Sequence[Layout], code: Code, args: Sequence[Value]) -> None:
    x, n_in, rows, *_ = args
    for layout in layouts:
        places = (x, code.integer(1), n_in * 4, code.integer(0))
        n = layout.together
        write_rows(layout, code, [*places, n_in, rows], code.integer(0), code.integer(n))
        if layout is not layouts[-1]:
            x += n_in * (4 * n)
            rows += layout.tile_bytes((n_in + (STRETCH - 1)) // STRETCH)


def write(
    type: str, n_rows: int, vnni: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program: rows of weights first .. last - 1. Arguments: see `program`."""
    _, _, x, blocks, row_bytes, y, n_out = args
    elements, n_bytes = sizes(type)
    stretch_bytes = n_bytes * (STRETCH // elements)
    n_stretches = (row_bytes + (stretch_bytes - 1)) // stretch_bytes
    layouts, n = _layouts(type, n_rows, vnni), halves(vnni)
    terms = _long_terms if layouts[0].long else _short_terms
    rest = None if layouts[0].long else _Rest(code, row_bytes, stretch_bytes)
    fast = type in FAST and n_rows <= FAST_ROWS and reads_ahead_into_second_cache()
    ahead = FAST_AHEAD if fast else AHEAD
    with code.loop(first, last) as row:
        start = blocks + row * row_bytes
        if rest:
            rest.copy(start)
        tile, to = x, y + row * 4
        for layout in layouts:
            rows = RowVectors(code, layout, tile)
            height = len(rows.filled)
            total = code.variable(code.constant(vector(F32, height), 0.0))
            with code.loop(0, n_stretches, n) as b:
                for line in range(0, stretch_bytes * n, LINE) if layout is layouts[0] else ():
                    code.prefetch(start + b * stretch_bytes + (ahead + line), near=not fast)
                # the last one once more where it has no neighbour
                indices = [b, *(code.smaller(b + i, n_stretches - 1) for i in range(1, n))]
                there = [start + index * stretch_bytes for index in indices]
                if rest:
                    there = [rest.instead(at, i) for at, i in zip(there, indices, strict=True)]
                here = rows.at(tile + b // n * layout.record_bytes)
                t = terms(code, type, vnni, there, here)
                total.set(total.value + t.part(0, height))
                for i in range(1, n):
                    more = total.value + t.part(height * i, height)
                    total.set(code.choose((b + i).less(n_stretches), more, total.value))
            for r in range(layout.together):
                code.store(total.value.part(r, 1), to + n_out * (4 * r))
            if layout is not layouts[-1]:
                tile += layout.tile_bytes(n_stretches)
                to += n_out * (4 * layout.together)


class _Rest:
    """What a row of weights has beyond whole stretches, as a stretch that ends with zeros."""

    def __init__(self, code: Code, row_bytes: Value, stretch_bytes: int) -> None:
        self._code, self._row_bytes, self._stretch_bytes = code, row_bytes, stretch_bytes
        self._whole = row_bytes // stretch_bytes
        self._memory = code.stack(stretch_bytes)
        for at in range(0, stretch_bytes, 8):
            code.store(code.constant(I64, 0), self._memory + at)

    def copy(self, row: Value) -> None:
        """Take the rest of the row at an address."""
        begin = self._whole * self._stretch_bytes
        with self._code.loop(begin, self._row_bytes) as at:
            self._code.store(self._code.load(row + at, I8), self._memory + (at - begin))

    def instead(self, stretch: Value, b: Value) -> Value:
        """The address of stretch b, which is at `stretch` if it is whole."""
        return self._code.choose(b.less(self._whole), stretch, self._memory)


def _short_terms(
    code: Code, type: str, vnni: int, stretches: Sequence[Value], rows: RowVectors
) -> Value:
    """t of integer_linear_naive for each lane of rows."""
    places = [(stretch, i) for stretch in stretches for i in range(PER_STRETCH)]
    integers, scales, factors, minimums = short_blocks(code, type, places)
    sides = max(1, len(factors))
    n, whole = len(integers) // sides, list[Value]()
    for side in range(sides):
        some = integers[n * side : n * (side + 1)]
        dots = dot_products(code, type, vnni, some, rows, first=n * side)
        whole = added(dots, [*factors[side : side + 1]] * rows.count, whole)
    products = [
        exact * (scales * row_scale)
        for exact, row_scale in zip(whole, rows.short_scales(), strict=True)
    ]
    if minimums is not None:
        more = zip(rows.scaled_sums(), products, strict=True)
        products = [code.fma(minimums, row_sums, p) for row_sums, p in more]
    return sums([products[i] for i in rows.filled])


def _long_terms(
    code: Code, type: str, vnni: int, blocks: Sequence[Value], rows: RowVectors
) -> Value:
    """As _short_terms, of blocks as long as a stretch."""
    weights, n = long_blocks(code, type, blocks), len(blocks)
    dots = dot_products(code, type, vnni, weights.bytes, rows, lane_scales(type, vnni, weights))
    x_scales = rows.long_scales()

    def scaled(exact: Sequence[Value], scales: Value) -> Value:
        whole = sums([exact[i] for i in rows.filled]).to_float(signed=True)
        return whole * (scales.take([part for part, _ in rows.lanes]) * x_scales)

    if rows.offset:
        less = _sixteens(weights.group_scales, n) * -rows.offset
        more = zip(dots, rows.sums(), strict=True)
        dots = [dot + pair_sums(code, less, row_sums) for dot, row_sums in more]
    t = scaled(dots, weights.scales)
    if weights.minimums is None or weights.group_minimums is None:
        return t
    factors = _sixteens(weights.group_minimums, n)
    away = [pair_sums(code, factors, row_sums) for row_sums in rows.sums()]
    return t - scaled(away, weights.minimums)


def _sixteens(groups: Value, n: int) -> Value:
    """i8, one for each group of n long blocks, as i16 [16 n], one for every GROUP elements."""
    return groups.repeated(STRETCH // GROUP * n // groups.type.count).extended(I16)
