"""Panels of weights, written from the GGUF blocks of some rows: 256 neighbouring numbers of each,
in the order of kernels.linear.integer_blocks.panel_layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.linear.block_parts import SHORT
from kernels.linear.decode_with_llvm import sizes
from kernels.linear.integer_blocks.activations_with_llvm import (
    FORMS,
    PER_STRETCH,
    STRETCH,
    Layout,
    quantise,
)
from kernels.linear.integer_blocks.integers_with_llvm import fours, long_blocks, short_blocks
from kernels.linear.integer_blocks.panel_layout import HALVES, WORD, Panel
from kernels.linear.packed import BYTE_ZERO
from kernels.llvm import Code, Value, kernel, transposed, vector
from kernels.llvm.values import I16, I32

# bytes between records, against all of them falling into the same few lines of the cache
GAP = 32
CACHE_LINE = 64


class WeightRows(NamedTuple):
    """A matrix in blocks of a type, to be taken in panels: its address, bytes and blocks of 32 of a
    row, its last row."""

    type: str
    panel: Panel
    blocks: Value
    row_bytes: Value
    row_blocks: Value
    last: Value

    def row(self, code: Code, index: Value) -> Value:
        """The address of a row; of those after the last one, the last one's."""
        return self.blocks + code.smaller(index, self.last) * self.row_bytes


def write_panel(code: Code, weights: WeightRows, first: Value, stretch: Value, to: Value) -> None:
    """A stretch of a panel's rows from `first` on. to: the address of weight_words lines."""
    panel = weights.panel
    if panel.long:
        _write_long(code, weights, first, stretch, to)
    else:
        for half in HALVES:
            start = panel.width * half
            rows = [weights.row(code, first + (start + r)) for r in range(panel.width)]
            with code.loop(0, code.integer(PER_STRETCH)) as i:
                index = stretch * PER_STRETCH + i
                _write_short(code, weights, rows, index, i, to + WORD * start)


def _write_short(
    code: Code, weights: WeightRows, rows: Sequence[Value], index: Value, i: Value, to: Value
) -> None:
    """Block i of a stretch, `index` of the rows. After their last one scales and minimums are 0,
    as the integers of x are there."""
    type, panel, (elements, n_bytes) = weights.type, weights.panel, sizes(weights.type)
    at = code.smaller(index, weights.row_blocks - 1)
    for row in rows:
        code.prefetch(row + (at * (n_bytes * SHORT // elements) + n_bytes * PER_STRETCH))
    parts, scales, factors, minimums = short_blocks(code, type, [(row, at) for row in rows])
    groups = [i + PER_STRETCH * side for side in range(panel.sides)]
    places = [place for group in groups for place in panel.words_of_group(group)]
    stored = [words for integers in parts for words in _words(panel, type, integers)]
    for place, words in zip(places, stored, strict=True):
        code.store(words, to + place * panel.line)
    for group, factor in zip(groups, factors, strict=False):
        code.store(factor, to + (group + panel.group_scales) * panel.line)
    exists, nothing = index.less(weights.row_blocks), code.constant(scales.type, 0.0)
    code.store(code.choose(exists, scales, nothing), to + (i + panel.scales) * panel.line)
    if minimums is not None:
        minimums = code.choose(exists, minimums, nothing)
        code.store(minimums, to + (i + panel.scale_minimums) * panel.line)


def _words(panel: Panel, type: str, integers: Value) -> list[Value]:
    """Words of integers as they are multiplied, of the bytes i8 [32] of a type."""
    if panel.words:
        return halves_of_words(integers.bits(vector(I32, integers.type.count // 4)))
    return [integers - FORMS[type].offset]


def halves_of_words(words: Value) -> list[Value]:
    """Of each word i32 of four i8 the first and the third as i16, then the others."""
    pairs = words.bits(vector(I16, 2 * words.type.count))
    return [(pairs << 8).down_signed(8), pairs.down_signed(8)]


def _write_long(code: Code, weights: WeightRows, first: Value, stretch: Value, to: Value) -> None:
    type, panel = weights.type, weights.panel
    record_bytes = WORD * panel.weight_words + GAP
    records = code.stack(panel.outputs * record_bytes)
    with code.loop(0, code.integer(panel.outputs)) as r:
        block = weights.row(code, first + r) + stretch * sizes(type)[1]
        _write_record(code, type, panel, block, records + r * record_bytes)
    _transpose(code, panel, records, record_bytes, to)


def _write_record(code: Code, type: str, panel: Panel, block: Value, record: Value) -> None:
    n_bytes = sizes(type)[1]
    for at in range(0, n_bytes, CACHE_LINE):
        code.prefetch(block + (n_bytes + at))
    parts = long_blocks(code, type, [block])
    scales = parts.group_scales.take(panel.group_order).extended(I16)
    for i, integers in enumerate(parts.bytes):
        for j, words in enumerate(_words(panel, type, integers)):
            if panel.words:
                words *= scales.repeated(2)
            n_words = panel.integers // PER_STRETCH
            code.store(words, record + (n_words * i + PER_STRETCH * j) * WORD)
    if panel.vnni:
        code.store(scales.extended(I32), record + WORD * panel.group_scales)
    elif not panel.words:
        code.store(scales.repeated(2), record + WORD * panel.group_scales)
    code.store(parts.scales, record + WORD * panel.scales)
    if parts.minimums is not None and parts.group_minimums is not None:
        minimums = parts.group_minimums.resize(I16)
        # for two sums of 16 integers each, where a group has 32
        pairs = minimums if panel.groups > PER_STRETCH else minimums.repeated(2)
        code.store(pairs, record + WORD * panel.group_minimums)
        code.store(parts.minimums, record + WORD * panel.scale_minimums)


def _transpose(code: Code, panel: Panel, records: Value, record_bytes: int, to: Value) -> None:
    with code.loop(0, code.integer(panel.weight_words), 4) as word:
        for half in HALVES:
            rows = [panel.width * half + r for r in range(panel.width)]
            found = fours(code, [records + word * WORD + record_bytes * row for row in rows])
            for i, column in enumerate(found):
                code.store(column, to + (word + i) * panel.line + panel.vector_bytes * half)


def pack(x: torch.Tensor, panel: Panel) -> torch.Tensor:
    """The n rows of x f32 [n, in] in tiles: uint8 [stretches, tiles, bytes of a tile].

    Where rows are missing in the last tile, the last row takes their place.
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


@kernel(4)
def _program(code: Code, args: Sequence[Value], tile: Value, panel: Panel) -> None:
    rows, n_rows, n_stretches, packed = args
    layout = Layout(panel.long, panel.lanes, minimums=panel.minimums)
    n_tiles = (n_rows + (panel.tall - 1)) // panel.tall
    with code.loop(0, n_stretches) as stretch:
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
    """As many words as there are rows, those of all rows next to each other, i32, from `at` on."""
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
