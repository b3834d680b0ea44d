"""Integer products of rows of x with a weight in BytePanels, for few rows and for many."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.linear.byte_products_with_llvm import multiply, store
from kernels.linear.byte_rows_with_llvm import (
    TAIL_BYTES,
    quantise,
    row_bytes,
    whole_rows,
    write_rows,
)
from kernels.linear.packed import INPUTS_PER_LANE, PANEL_OUTPUTS, BytePanels
from kernels.llvm import Code, Program, Value
from kernels.llvm.rows import RowPlaces

FEW_ROWS = 8
"""Up to so many rows of integers are multiplied with one panel after the other, and the weights
read once; more are multiplied with WIDE panels at a time."""

# panels, and rows of integers, whose sums are in registers at the same time
WIDE, TALL = 2, (12, 8, 4, 2, 1)
# stretches of panels that a thread takes at a time, for every thread: as long as can be, since
# memory is faster the longer it is read in order
STRETCHES = 2
# products that are done before a second thread has woken up
ALONE = 1 << 18
_NO_ROWS = (0, 1, 0, 0)


def linear(x: torch.Tensor, n_integers: int, panels: BytePanels, n_out: int) -> torch.Tensor:
    """x f32 [..., in] -> f32 [..., n_out], each row as one row of integers or as two."""
    n_in, y = x.shape[-1], torch.empty(*x.shape[:-1], n_out)
    n_rows = x.numel() // n_in
    if n_rows * n_integers > FEW_ROWS:
        _run_many(quantise(x, n_integers), n_integers, panels, y)
    elif n_rows:
        integers = torch.empty(n_rows * row_bytes(n_in, n_integers), dtype=torch.uint8)
        # one call for both: the rows may be ready before other threads have woken up
        x, places = whole_rows(x)
        _run_few(n_rows, integers, n_integers, panels, y, places)
    return y


def product(
    integers: torch.Tensor, n_integers: int, panels: BytePanels, n_out: int
) -> torch.Tensor:
    """Rows that `quantise` has made [n, row_bytes] -> f32 [n, n_out]."""
    n_rows = len(integers)
    y = torch.empty(n_rows, n_out)
    if n_rows * n_integers > FEW_ROWS:
        _run_many(integers, n_integers, panels, y)
    elif n_rows:
        _run_few(n_rows, integers, n_integers, panels, y)
    return y


def _run_few(
    n_rows: int,
    integers: torch.Tensor,
    n_integers: int,
    panels: BytePanels,
    y: torch.Tensor,
    places: RowPlaces | None = None,
) -> None:
    """places: of rows of x that become the integers before."""
    weights, threads = panels.bytes, torch.get_num_threads()
    n_panels, stretches = weights.shape[0], STRETCHES * threads
    if weights.numel() * n_rows <= ALONE:
        stretches = 1
    _few(n_rows, n_integers)(
        *(places or _NO_ROWS),
        _n_in(panels),
        integers.data_ptr(),
        n_rows if places else 0,
        weights.data_ptr(),
        panels.scales.data_ptr(),
        y.data_ptr(),
        y.shape[-1],
        tasks=n_panels,
        chunk=-(-n_panels // stretches),
        threads=threads,
    )


def _run_many(integers: torch.Tensor, n_integers: int, panels: BytePanels, y: torch.Tensor) -> None:
    weights, threads = panels.bytes, torch.get_num_threads()
    n_tiles = -(-weights.shape[0] // WIDE)
    _many(n_integers)(
        integers.data_ptr(),
        integers.shape[0],
        _n_in(panels),
        weights.data_ptr(),
        panels.scales.data_ptr(),
        y.data_ptr(),
        y.shape[-1],
        tasks=n_tiles,
        chunk=-(-n_tiles // (4 * threads)),
        threads=threads,
    )


def _n_in(panels: BytePanels) -> int:
    return panels.bytes.shape[1] * INPUTS_PER_LANE


@functools.cache
def _few(n_rows: int, n_integers: int) -> Program:
    def before(code: Code, args: Sequence[Value]) -> None:
        write_rows(n_integers, code, args[:6], code.integer(0), args[6])

    return Program(functools.partial(_few_body, n_rows, n_integers), 11, before)


def _few_body(
    n_rows: int, n_integers: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: those of write_rows, how many rows it writes, bytes and scales, y, its width."""
    n_in, integers, _, weights, scales, y, n_out = args[4:]
    at_once = max(1, 4 // (n_rows * n_integers))
    with code.loop(first, last) as panel:
        start = weights + panel * n_in * PANEL_OUTPUTS
        (results,) = multiply(code, integers, n_rows, n_integers, n_in, [start], at_once)
        store(code, results, panel, scales, y, n_out)


@functools.cache
def _many(n_integers: int) -> Program:
    return Program(functools.partial(_many_body, n_integers), 7)


def _many_body(
    n_integers: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    integers, n_rows, n_in, weights, scales, y, n_out = args
    row_bytes = n_in * n_integers + TAIL_BYTES
    final = (n_out + (PANEL_OUTPUTS - 1)) // PANEL_OUTPUTS - 1
    with code.loop(first, last) as tile:
        # behind the last panel stands the last once more, with the same results
        panels = [code.smaller(tile * WIDE + i, final) for i in range(WIDE)]
        starts = [weights + panel * n_in * PANEL_OUTPUTS for panel in panels]
        begin = code.integer(0)
        for tall in (t // n_integers for t in TALL if t >= n_integers):
            end = n_rows - (n_rows - begin) % tall
            with code.loop(begin, end, tall) as row:
                rows, to = integers + row * row_bytes, y + row * n_out * 4
                found = multiply(code, rows, tall, n_integers, n_in, starts)
                for panel, results in zip(panels, found, strict=True):
                    store(code, results, panel, scales, to, n_out)
            begin = end
