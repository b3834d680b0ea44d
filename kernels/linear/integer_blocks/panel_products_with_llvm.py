"""A panel of weights times a few rows of x: the numbers t of
integer_linear_naive."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llvmlite import ir

from kernels.linear.integer_blocks.activations_with_llvm import PER_STRETCH
from kernels.linear.integer_blocks.panel_layout import HALVES, WORD, Panel
from kernels.linear.integer_blocks.row_products_with_llvm import (
    add_byte_sums,
    added,
    byte_pair_sums,
    pair_sums,
)
from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.code import Variable
from kernels.llvm.values import I8, I16, I32


class Operands(NamedTuple):
    """Addresses of a panel; of its sums' first values, i32 for every sum; of `tall` rows of x.

    Vectors are of numbers of one kind: I8, I16, I32 or F32.
    """

    panel: Panel
    weights: Value
    starts: Value
    x: Value
    tall: int

    def weight(self, code: Code, word: Value, kind: ir.Type) -> list[Value]:
        """A word of every weight row."""
        return self._halves(code, self.weights + word * self.panel.line, kind)

    def start(self, code: Code, index: Value) -> list[Value]:
        return self._halves(code, self.starts + index * self.panel.line, I32)

    def row(self, code: Code, word: Value, r: int, kind: ir.Type) -> Value:
        """A word of a row of x in every lane."""
        at = self.x + word * (WORD * self.tall) + WORD * r
        return code.splat(code.load(at, I32), self.panel.width).bits(self.vector(kind))

    def vector(self, kind: ir.Type) -> ir.VectorType:
        return vector(kind, self.panel.width * _PER_WORD[kind])

    def zero(self, code: Code, kind: ir.Type = I32) -> Value:
        return code.constant(self.vector(kind), 0)

    def _halves(self, code: Code, at: Value, kind: ir.Type) -> list[Value]:
        step = self.panel.vector_bytes
        return [code.load(at + step * half, self.vector(kind)) for half in HALVES]


_PER_WORD = {I8: 4, I16: 2, I32: 1, F32: 1}


Sums = list[list[Variable]]
"""i32 [width] for each row of x and each half of the weight rows."""


def write_starts(code: Code, panel: Panel, operands: Operands) -> None:
    """Sets the first values so that what BYTE_ZERO adds to the integers of x does not count.

    operands: x is one row, its integers all 0.
    """
    nothing = operands.zero(code)
    if panel.long:
        sums = _begin(code, operands, [nothing for _ in HALVES])
        with code.loop(0, code.integer(panel.groups)) as group:
            _add_group(code, panel, sums, operands, group)
        _store_starts(code, operands, sums, operands.starts)
    else:
        with code.loop(0, code.integer(panel.groups)) as group:
            sums = _begin(code, operands, [nothing for _ in HALVES])
            _add_group(code, panel, sums, operands, group)
            _store_starts(code, operands, sums, operands.starts + group * panel.line)


def _store_starts(code: Code, operands: Operands, sums: Sums, to: Value) -> None:
    for half, total in enumerate(sums[0]):
        code.store(operands.zero(code) - total.value, to + operands.panel.vector_bytes * half)


def products(
    code: Code, panel: Panel, operands: Operands, kept: Value
) -> Iterator[tuple[int, int, Value]]:
    """The t of every row of x and half of the weight rows: row, half, f32 [width].

    kept: room for the products of short blocks in a stretch.
    """
    if panel.long:
        return _long_products(code, panel, operands)
    return _short_products(code, panel, operands, kept)


def _long_products(
    code: Code, panel: Panel, operands: Operands
) -> Iterator[tuple[int, int, Value]]:
    zero = code.integer(0)
    sums = _begin(code, operands, _first_values(code, panel, operands, zero))
    with code.loop(0, code.integer(panel.groups)) as group:
        _add_group(code, panel, sums, operands, group)
    less = _begin(code, operands, [operands.zero(code) for _ in HALVES])
    minimum_scales: list[Value] = []
    if panel.minimums:
        with code.loop(0, code.integer(PER_STRETCH)) as i:
            minimums = operands.weight(code, i + panel.group_minimums, I16)
            for r, totals in enumerate(less):
                row_sum = operands.row(code, i + panel.row_sums, r, I16)
                for total, minimum in zip(totals, minimums, strict=True):
                    total.set(total.value + pair_sums(code, minimum, row_sum))
        minimum_scales = operands.weight(code, zero + panel.scale_minimums, F32)
    scales = operands.weight(code, zero + panel.scales, F32)
    for r in range(operands.tall):
        row_scale = operands.row(code, zero + panel.row_scales, r, F32)
        for half in HALVES:
            t = sums[r][half].value.to_float(signed=True) * (scales[half] * row_scale)
            if panel.minimums:
                more = less[r][half].value.to_float(signed=True)
                t = t - more * (minimum_scales[half] * row_scale)
            yield r, half, t


def _short_products(
    code: Code, panel: Panel, operands: Operands, kept: Value
) -> Iterator[tuple[int, int, Value]]:
    line, tile_bytes = panel.line, panel.line * operands.tall
    with code.loop(0, code.integer(PER_STRETCH)) as block:
        whole: list[list[Value]] = [[] for _ in range(operands.tall)]
        for group in [block + PER_STRETCH * side for side in range(panel.sides)]:
            sums = _begin(code, operands, _first_values(code, panel, operands, group))
            _add_group(code, panel, sums, operands, group)
            factors: list[Value] = []
            if panel.sides > 1:
                factors = operands.weight(code, group + panel.group_scales, F32)
            dots = [[total.value for total in row] for row in sums]
            whole = [added(each, factors, some) for each, some in zip(dots, whole, strict=True)]
        scales = operands.weight(code, block + panel.scales, F32)
        minimums: list[Value] = []
        if panel.minimums:
            minimums = operands.weight(code, block + panel.scale_minimums, F32)
        for r in range(operands.tall):
            row_scale = operands.row(code, block + panel.row_scales, r, F32)
            for half in HALVES:
                p = whole[r][half] * (scales[half] * row_scale)
                if panel.minimums:
                    row_sum = operands.row(code, block + panel.row_sums, r, F32)
                    p = code.fma(minimums[half], row_sum, p)
                code.store(p, kept + block * tile_bytes + (line * r + panel.vector_bytes * half))
    for r in range(operands.tall):
        for half in HALVES:
            at = kept + (line * r + panel.vector_bytes * half)
            places = [at + tile_bytes * j for j in range(PER_STRETCH)]
            parts = [code.load(place, operands.vector(F32)) for place in places]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            yield r, half, parts[0]


def _first_values(code: Code, panel: Panel, operands: Operands, index: Value) -> list[Value]:
    if panel.starts:
        return operands.start(code, index)
    return [operands.zero(code) for _ in HALVES]


def _begin(code: Code, operands: Operands, first: Sequence[Value]) -> Sums:
    return [[code.variable(value) for value in first] for _ in range(operands.tall)]


def _add_group(code: Code, panel: Panel, sums: Sums, operands: Operands, group: Value) -> None:
    """Adds the products of a group, times its scale where the block is long."""
    words = panel.words_of_group(group)
    if panel.words:
        _add_products(code, panel, sums, operands, words, _add_pairs)
    elif not panel.vnni:
        factors = [code.constant(operands.vector(I16), 1) for _ in HALVES]
        if panel.long:
            factors = operands.weight(code, group + panel.group_scales, I16)
        together = min(panel.together, len(words))
        for start in range(0, len(words), together):
            parts = _begin(code, operands, [operands.zero(code, I16) for _ in HALVES])
            _add_products(code, panel, parts, operands, words[start : start + together], _add_bytes)
            _add_scaled(sums, parts, factors, functools.partial(pair_sums, code))
    elif panel.long:
        factors = operands.weight(code, group + panel.group_scales, I32)
        parts = _begin(code, operands, [operands.zero(code) for _ in HALVES])
        _add_products(code, panel, parts, operands, words, add_byte_sums)
        _add_scaled(sums, parts, factors, operator.mul)
    else:
        _add_products(code, panel, sums, operands, words, add_byte_sums)


def _add_scaled(
    sums: Sums, parts: Sums, factors: Sequence[Value], multiply: Callable[[Value, Value], Value]
) -> None:
    for totals, row in zip(sums, parts, strict=True):
        for total, part, factor in zip(totals, row, factors, strict=True):
            total.set(total.value + multiply(part.value, factor))


def _add_products(
    code: Code,
    panel: Panel,
    sums: Sums,
    operands: Operands,
    words: Sequence[Value],
    add: Callable[[Code, Value, Value, Value], Value],
) -> None:
    """add: (code, total, one word, another) -> total; bytes of the one have no sign."""
    for word in words:
        weights = operands.weight(code, word, I8)
        for r, totals in enumerate(sums):
            row = operands.row(code, word, r, I8)
            for total, weight in zip(totals, weights, strict=True):
                one, other = (row, weight) if panel.signed else (weight, row)
                total.set(add(code, total.value, one, other))


def _add_pairs(code: Code, total: Value, one: Value, other: Value) -> Value:
    words = vector(I16, one.type.count // 2)
    return total + pair_sums(code, one.bits(words), other.bits(words))


def _add_bytes(code: Code, total: Value, one: Value, other: Value) -> Value:
    return total + byte_pair_sums(code, one, other)
