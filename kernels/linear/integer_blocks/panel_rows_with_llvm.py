"""Quantised rows of x, their records transposed: see kernels.linear.integer_blocks.panel_layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.linear.integer_blocks.activations_with_llvm import STRETCH, Layout, quantise
from kernels.linear.integer_blocks.integers_with_llvm import PER_STRETCH
from kernels.linear.integer_blocks.panel_layout import BYTE_ZERO, WORD, Panel
from kernels.linear.integer_blocks.panel_weights_with_llvm import halves_of_words
from kernels.llvm import Code, Program, Value, transposed, vector
from kernels.llvm.values import I32


def pack(x: torch.Tensor, panel: Panel) -> torch.Tensor:
    """The n rows of x f32 [n, in] in tiles: uint8 [stretches, tiles, bytes of a tile].

    Where rows are missing in the last tile, the last row stands.
    """
    rows = quantise(x, Layout(panel.long, panel.lanes, minimums=panel.minimums))
    n_rows, n_stretches = len(rows), -(-x.shape[1] // STRETCH)
    n_tiles, threads = -(-n_rows // panel.tall), torch.get_num_threads()
    packed = torch.empty(n_stretches, n_tiles, panel.tile_bytes, dtype=torch.uint8)
    _program(panel)(
        rows.data_ptr(),
        n_rows,
        n_stretches,
        packed.data_ptr(),
        tasks=n_tiles,
        chunk=-(-n_tiles // threads),
        threads=threads,
    )
    return packed


@functools.cache
def _program(panel: Panel) -> Program:
    return Program(functools.partial(_pack, panel), 4)


def _pack(panel: Panel, code: Code, args: Sequence[Value], first: Value, last: Value) -> None:
    rows, n_rows, n_stretches, packed = args
    layout = Layout(panel.long, panel.lanes, minimums=panel.minimums)
    n_tiles = (n_rows + (panel.tall - 1)) // panel.tall
    with code.loop(first, last) as tile, code.loop(0, n_stretches) as stretch:
        indices = [code.smaller(tile * panel.tall + r, n_rows - 1) for r in range(panel.tall)]
        there = rows + stretch * layout.record_bytes
        sources = [there + index * layout.tile_bytes(n_stretches) for index in indices]
        to = packed + (stretch * n_tiles + tile) * panel.tile_bytes
        with code.loop(0, code.integer(STRETCH // WORD), panel.tall) as first_word:
            for i, column in enumerate(_columns(code, sources, first_word * WORD)):
                _store_integers(panel, code, column, first_word + i, to)
        if panel.long:
            for r, source in enumerate(sources):
                at = to + (panel.row_line * panel.row_scales + WORD * r)
                code.store(code.load(source + layout.scales, I32), at)
        else:
            _copy_eight(panel, code, sources, layout.scales, to + panel.row_line * panel.row_scales)
        if panel.minimums:
            sums = layout.sums if panel.long else layout.scaled_sums
            _copy_eight(panel, code, sources, sums, to + panel.row_line * panel.row_sums)


def _columns(code: Code, sources: Sequence[Value], at: Value) -> list[Value]:
    """As many words as there are rows, those of all rows beside each other, i32, from `at` on."""
    together = vector(I32, len(sources))
    return transposed([code.load(source + at, together) for source in sources])


def _copy_eight(panel: Panel, code: Code, sources: Sequence[Value], at: int, to: Value) -> None:
    """PER_STRETCH words of all the rows."""
    for first in range(0, PER_STRETCH, panel.tall):
        for i, column in enumerate(_columns(code, sources, code.integer(at + WORD * first))):
            code.store(column, to + panel.row_line * (first + i))


def _store_integers(panel: Panel, code: Code, column: Value, i: Value, to: Value) -> None:
    """Four integers of every row, i8."""
    if panel.words:
        group, k = i // PER_STRETCH, i % PER_STRETCH
        for j, words in enumerate(halves_of_words(column)):
            code.store(words, to + ((group * 2 + j) * PER_STRETCH + k) * panel.row_line)
    else:
        more = BYTE_ZERO * 0x01010101 if panel.starts else 0
        code.store(column ^ more, to + i * panel.row_line)
