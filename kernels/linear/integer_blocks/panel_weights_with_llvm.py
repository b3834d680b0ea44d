"""A stretch of some weight rows as a panel: see kernels.linear.integer_blocks.panel_layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels.linear.decode_with_llvm import sizes
from kernels.linear.integer_blocks.integers_with_llvm import (
    FORMS,
    PER_STRETCH,
    fours,
    long_blocks,
    short_blocks,
)
from kernels.linear.integer_blocks.panel_layout import HALVES, WORD, Panel
from kernels.llvm import Code, Value, vector
from kernels.llvm.values import I16, I32

# bytes between records, against all of them falling into the same few lines of the cache
GAP = 32
CACHE_LINE = 64


class WeightRows(NamedTuple):
    """A matrix in blocks: its address, bytes and blocks of a row, its last row."""

    blocks: Value
    row_bytes: Value
    row_blocks: Value
    last: Value

    def row(self, code: Code, index: Value) -> Value:
        """The address of a row; of those behind the last one, the last one's."""
        return self.blocks + code.smaller(index, self.last) * self.row_bytes


def write_panel(
    code: Code,
    type: str,
    panel: Panel,
    weights: WeightRows,
    first: Value,
    stretch: Value,
    to: Value,
) -> None:
    """A stretch of a panel's rows from `first` on. to: the address of weight_words lines."""
    if panel.long:
        _write_long(code, type, panel, weights, first, stretch, to)
    else:
        for half in HALVES:
            start = panel.width * half
            rows = [weights.row(code, first + (start + r)) for r in range(panel.width)]
            with code.loop(0, code.integer(PER_STRETCH)) as i:
                index = stretch * PER_STRETCH + i
                _write_short(code, type, panel, weights, rows, index, i, to + WORD * start)


def _write_short(
    code: Code,
    type: str,
    panel: Panel,
    weights: WeightRows,
    rows: Sequence[Value],
    index: Value,
    i: Value,
    to: Value,
) -> None:
    """Block i of a stretch, `index` of the rows. Behind their last one scales and minimums are 0,
    as the integers of x are there."""
    n_bytes = sizes(type)[1]
    at = code.smaller(index, weights.row_blocks - 1) * n_bytes
    blocks = [row + at for row in rows]
    for block in blocks:
        code.prefetch(block + n_bytes * PER_STRETCH)
    parts = short_blocks(code, type, blocks)
    places, per_part = panel.words_of_group(i), panel.group_words // len(parts.bytes)
    for k, integers in enumerate(parts.bytes):
        for j, words in enumerate(_words(panel, type, integers)):
            code.store(words, to + places[per_part * k + j] * panel.line)
    exists, nothing = index.less(weights.row_blocks), code.constant(parts.scales.type, 0.0)
    code.store(code.choose(exists, parts.scales, nothing), to + (i + panel.scales) * panel.line)
    if parts.minimums is not None:
        minimums = code.choose(exists, parts.minimums, nothing)
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


def _write_long(
    code: Code,
    type: str,
    panel: Panel,
    weights: WeightRows,
    first: Value,
    stretch: Value,
    to: Value,
) -> None:
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
