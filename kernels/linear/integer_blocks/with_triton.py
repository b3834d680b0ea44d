"""The integer products on a GPU, with the bits of `integer_linear_naive`: four weights and four
numbers of a row are multiplied by one instruction (dp4a).

A step takes 256 neighbouring weights of a row, 64 words of four integers. Most types keep two of
those in one word of the file, GAP words apart: such a pair is read once. Blocks stay as the file
has them; those whose size is not a multiple of four bytes are read in smaller parts.

Matrices that read the same rows are one launch, whatever their types, small ones of f32 among them;
what is done to a result before another product reads it is done where it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kernels.dispatch import COUNTERS, counters
from kernels.linear.block_linear.with_triton import FEW_ROWS, expanded_product
from kernels.linear.block_parts import LONG, IntegerRows, PreparedRows, Residual, Rows, is_long
from kernels.linear.integer_blocks.digits_with_triton import (
    digits_of_long,
    digits_of_short,
    dp4a,
    half_at,
    scale_of_short,
    scales_of_long,
)
from kernels.linear.integer_blocks.rows_with_triton import (
    MOST_NORMED,
    NO_FINISH,
    WORDS_OF_GROUP,
    Finish,
    empty_integers,
    finish_when_done,
    integer_rows,
    is_last,
    kinds_of,
    norm_after,
    part_of,
    parts_of,
    round_columns,
    store_row,
)
from kernels.linear.packed import BlockData, PackedWeight
from kernels.pointwise.with_triton import EXPRESSIONS
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

MAX_ROWS = 8
"""Rows of x in one program: each such group reads the weights once."""
LEAST_PROGRAMS = 2048
"""Programs of one warp that keep a GPU busy; where there are more, each takes several rows of
weights."""
MOST_COLUMNS = 8
SMALL = 1024
"""Rows of a matrix of f32 numbers that a launch takes in; larger ones are the vendor's."""
GAPS = {"Q8_0": 8, "Q2_K": 8, "Q3_K": 8, "Q4_K": 8, "Q5_K": 8, "Q6_K": 16}
"""Words between the two of a pair; 4 in other types."""
MINIMUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")


@jit
def _sum_of_pairs(t, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr):
    first, second = tl.split(tl.reshape(t, (BM, BN, N, 2)))
    return first + second


@jit
def _numbers(
    weights, x, x_row, m, in_rows, n, in_columns, n_in, BM: tl.constexpr, BN: tl.constexpr
):
    """BN columns of results for BM rows, of weights and rows of f32 numbers."""
    k = tl.arange(0, 128)
    rows = weights.to(tl.pointer_type(tl.float32)) + n.to(tl.int64)[:, None] * n_in + k[None]
    x += m[:, None] * x_row + k[None]
    total = tl.zeros((BM, BN, 128), tl.float32)
    for start in range(0, n_in, 128):
        known = (k < n_in - start)[None]
        factors = tl.load(rows + start, in_columns[:, None] & known, 0.0)
        numbers = tl.load(x + start, in_rows[:, None] & known, 0.0)
        total = tl.fma(numbers[:, None], factors[None], total)
    return tl.sum(total, 2)


@jit
def block_sums(
    weights, rows, m, in_rows, n, in_columns, row_bytes, n_in,
    TYPE: tl.constexpr, LAYOUTS: tl.constexpr, AT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same of blocks and rows of integers, with their scales and sums."""
    integers, scales, sums = rows
    IS_LONG: tl.constexpr = LAYOUTS[7 * AT]
    HAS_MINIMUMS: tl.constexpr = LAYOUTS[7 * AT + 1]
    SIZE: tl.constexpr = LAYOUTS[7 * AT + 2]
    GAP: tl.constexpr = LAYOUTS[7 * AT + 3]
    GROUP: tl.constexpr = LAYOUTS[7 * AT + 4]
    TOGETHER: tl.constexpr = LAYOUTS[7 * AT + 5]
    PAIRED: tl.constexpr = LAYOUTS[7 * AT + 6]
    PARTS: tl.constexpr = (32 if PAIRED else 64) // TOGETHER
    part = tl.arange(0, PARTS)
    p = part[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    row = weights + n.to(tl.int64) * row_bytes
    n_stretches = (n_in + 255) // 256
    first_at = p // GAP * (2 * GAP) + p % GAP if PAIRED else p
    words = integers.to(tl.pointer_type(tl.int32)) + m[:, None, None] * (n_in // 4) + first_at[None]
    total = tl.zeros((BM, BN), tl.float32)
    for s in range(n_stretches):
        if IS_LONG:
            block = row + s * SIZE
            digits, other = digits_of_long(
                block[:, None, None], p[None], in_columns[:, None, None], TYPE
            )
            some = in_rows[:, None, None]
            a = dp4a(digits[None], tl.load(words + s * 64, some, 0)[:, None])
            b = dp4a(other[None], tl.load(words + s * 64 + GAP, some, 0)[:, None])
            start = part * TOGETHER
            start = start // GAP * (2 * GAP) + start % GAP
            group, next_group = start // GROUP, (start + GAP) // GROUP
            inside = in_columns[:, None]
            scale, low = scales_of_long(block[:, None], group[None], inside, TYPE)
            next_scale, next_low = scales_of_long(block[:, None], next_group[None], inside, TYPE)
            exact = tl.sum(a, 3) * scale[None] + tl.sum(b, 3) * next_scale[None]
            d_row = tl.load(scales + m * n_stretches + s, in_rows, 0.0)
            if TYPE == "Q6_K":
                d = half_at(block + 208, in_columns)
            elif TYPE == "Q3_K":
                d = half_at(block + 108, in_columns)
            elif TYPE == "Q2_K":
                d = half_at(block + 80, in_columns)
            else:
                d = half_at(block, in_columns)
            t = tl.sum(exact, 2).to(tl.float32) * (d[None] * d_row[:, None])
            if HAS_MINIMUMS:
                of_groups = sums + (m[:, None] * n_stretches + s) * (64 // GROUP)
                sum_a = tl.load(of_groups + group[None], in_rows[:, None], 0)
                sum_b = tl.load(of_groups + next_group[None], in_rows[:, None], 0)
                less = tl.sum(sum_a[:, None] * low[None] + sum_b[:, None] * next_low[None], 2)
                d_min = half_at(block + (82 if TYPE == "Q2_K" else 2), in_columns)
                t -= less.to(tl.float32) * (d_min[None] * d_row[:, None])
        else:
            number = s * 8 + part
            within = number < n_in // 32
            block = row[:, None] + number[None] * SIZE
            inside = in_columns[:, None] & within[None]
            some = in_rows[:, None, None] & within[None, :, None]
            digits, other = digits_of_short(
                block[:, :, None], tl.arange(0, TOGETHER)[None, None], inside[:, :, None], TYPE
            )
            dots = dp4a(digits[None], tl.load(words + s * 64, some, 0)[:, None])
            if PAIRED:
                dots += dp4a(other[None], tl.load(words + s * 64 + GAP, some, 0)[:, None])
            of_rows = m[:, None] * (n_in // 32) + number[None]
            some_blocks = in_rows[:, None] & within[None]
            d_row = tl.load(scales + of_rows, some_blocks, 0.0)
            d = scale_of_short(block, inside, TYPE)
            t = tl.sum(dots, 3).to(tl.float32) * (d[None] * d_row[:, None])
            if HAS_MINIMUMS:
                sum_row = tl.load(sums + of_rows, some_blocks, 0.0)
                least = tl.broadcast_to(half_at(block + 2, inside)[None], (BM, BN, 8))
                t = tl.fma(least, tl.broadcast_to(sum_row[:, None], (BM, BN, 8)), t)
            t = _sum_of_pairs(t, BM, BN, 4)
            t = _sum_of_pairs(t, BM, BN, 2)
            first, second = tl.split(t)
            t = first + second
        total += t
    return total


@jit
def _of_part(
    x, x_row, rows, weights, m, in_rows, n, in_columns, row_bytes, n_in,
    TYPE: tl.constexpr, LAYOUTS: tl.constexpr, AT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if TYPE == "F32":
        total = _numbers(weights, x, x_row, m, in_rows, n, in_columns, n_in, BM, BN)
    else:
        total = block_sums(
            weights, rows, m, in_rows, n, in_columns, row_bytes, n_in, TYPE, LAYOUTS, AT, BM, BN
        )
    return total


@jit
def _product(
    x, x_row, rows, parts, y, residual, residual_row, then, counters, n_rows, n_in, y_row,
    TYPES: tl.constexpr, LAYOUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr, FINISH: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Some columns of one of the matrices, for BM rows. parts: of each its weights, rows, bytes of
    one, first program and column of results; its type is in TYPES (LAYOUTS: `_layout`), the place
    of its integers among `rows` in ROWS, columns of a program in COLUMNS. The residual is added.
    FINISH: what else becomes of rows, or None."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    in_rows, m = m < n_rows, m.to(tl.int64)
    for i in tl.static_range(len(TYPES)):
        weights, n_out, row_bytes, first, column = parts[i]
        start = (tl.program_id(0) - first) * COLUMNS[i]
        if (start >= 0) & (start < n_out):
            n = start + tl.arange(0, COLUMNS[i])
            in_columns = n < n_out
            total = _of_part(
                x, x_row, rows[ROWS[i]], weights, m, in_rows, n, in_columns, row_bytes, n_in,
                TYPES[i], LAYOUTS, i, BM, COLUMNS[i],
            )  # fmt: skip
            kept = in_rows[:, None] & in_columns[None]
            n += column
            if RESIDUAL:
                total = tl.load(residual + m[:, None] * residual_row + n[None], kept, 0.0) + total
            tl.store(y + m[:, None] * y_row + n[None], total, kept)
    if FINISH is not None:
        first_row = tl.program_id(1).to(tl.int64) * BM
        finish_when_done(
            y, then, counters + tl.program_id(1), tl.num_programs(0), first_row,
            tl.minimum(first_row + BM, n_rows), y_row, FINISH, KEPT,
        )  # fmt: skip


@jit
def _opened(
    x, x_row, rows, parts, y, numbers, kept, counters, n_rows, n_in, width,
    TYPES: tl.constexpr, LAYOUTS: tl.constexpr, ROWS: tl.constexpr, EXPRESSION: tl.constexpr,
    KEPT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Some columns of an expression of the results of two matrices of `width` rows, which are
    rounded if any are KEPT."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    in_rows, m = m < n_rows, m.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_columns = n < width
    gate = _of_part(
        x, x_row, rows[ROWS[0]], parts[0][0], m, in_rows, n, in_columns, parts[0][1], n_in,
        TYPES[0], LAYOUTS, 0, BM, BN,
    )  # fmt: skip
    up = _of_part(
        x, x_row, rows[ROWS[1]], parts[1][0], m, in_rows, n, in_columns, parts[1][1], n_in,
        TYPES[1], LAYOUTS, 1, BM, BN,
    )  # fmt: skip
    opened = EXPRESSION(gate, up, *numbers)
    tl.store(y + m[:, None] * width + n[None], opened, in_rows[:, None] & in_columns[None])
    if len(KEPT) > 0:
        first_row = tl.program_id(1).to(tl.int64) * BM
        last_row = tl.minimum(first_row + BM, n_rows)
        round_when_done(
            y, kept, counters, tl.program_id(1), first_row, last_row, tl.program_id(0) * BN, width,
            KEPT, BN,
        )  # fmt: skip


@jit
def round_when_done(
    y, kept, counters, tile, first_row, last_row, column, width, KEPT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Rounds columns in groups of 256, as far as a tile's rows are complete there: done by the
    program that is the last to store BN columns of a group, here from `column` on."""
    first = column // 256 * 256
    counter = counters + tile * tl.cdiv(width, 256) + first // 256
    if is_last(counter, tl.cdiv(tl.minimum(width - first, 256), BN)):
        at = first + tl.arange(0, 256)
        for row in range(first_row, last_row):
            values = tl.load(y + row * width + at, at < width, 0.0, cache_modifier=".cg")
            store_row(values, kept, row, first, width, True, KEPT, 256)


class Part(NamedTuple):
    """A matrix of one type: bytes or numbers, rows, bytes of one, GGML type."""

    data: Tensor
    n_out: int
    row_bytes: int
    type: str


def _parts(packed: PackedWeight) -> list[Part] | None:
    """None where a part has no place in these kernels."""
    found = []
    for each in packed.data if packed.mode == "parts" else (packed,):
        n_out, n_in = each.shape
        if each.rounding:
            return None
        if each.mode == "q8" and isinstance(each.data, BlockData):
            found.append(Part(each.data.bytes, n_out, each.data.bytes.shape[1], each.data.type))
        elif each.mode == "f32" and isinstance(each.data, Tensor) and n_out <= SMALL:
            found.append(Part(each.data.contiguous(), n_out, 4 * n_in, "F32"))
        else:
            return None
    return found


def _layout(type: str) -> tuple[int, ...]:
    """What a kernel knows of a type: whether its blocks are long and have minimums, their bytes,
    words between the two of a pair and of a group, of the words of pairs those that have a scale in
    common, or of a block, and whether there are pairs."""
    if type == "F32":
        return (0,) * 7
    long, gap, group = is_long(type), GAPS.get(type, 4), WORDS_OF_GROUP.get(type, 4)
    is_paired = type != "Q8_0"
    together = min(gap, group) if long else 4 if is_paired else 8
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type]][1]
    return int(long), int(type in MINIMUMS), size, gap, group, together, int(is_paired)


class ProductLaunch:
    """What the launches of a product have in common."""

    def __init__(self, x: Tensor | PreparedRows, parts: Sequence[Part], invariant: bool) -> None:
        numbers = x.numbers if isinstance(x, PreparedRows) else x
        self.rows = as_rows(numbers)
        self.n_rows, self.n_in = self.rows.shape
        self.wanted = list(dict.fromkeys(part_of(p.type) for p in parts if p.type != "F32"))
        ready: dict[int, IntegerRows] = dict(x.integers) if isinstance(x, PreparedRows) else {}
        if missing := [part for part in self.wanted if part not in ready]:
            ready |= integer_rows(self.rows, missing)
        self.integers = tuple(tuple(ready[part]) for part in self.wanted)
        # a sum of f32 numbers has an order that the sides of a tile could change
        fixed = invariant and any(part.type == "F32" for part in parts)
        self.side = MAX_ROWS if fixed else min(power_of_2(self.n_rows), MAX_ROWS)

    def places(
        self, parts: Sequence[Part], rows: Sequence[int] | None = None
    ) -> dict[str, tuple[object, ...]]:
        """Of the parts TYPES, LAYOUTS and ROWS. rows: the last, where parts have rows of their
        own."""
        if rows is None:
            rows = [0 if p.type == "F32" else self.wanted.index(part_of(p.type)) for p in parts]
        return {
            "TYPES": tuple(part.type for part in parts),
            "ROWS": tuple(rows),
            "LAYOUTS": tuple(number for part in parts for number in _layout(part.type)),
        }


def products(
    x: Tensor | PreparedRows,
    packed: Sequence[PackedWeight],
    *,
    invariant: bool = False,
    residual: Residual | None = None,
    finish: Finish | None = None,
) -> list[Tensor] | None:
    """See kernels.linear.linear_each; None where the matrices or the rows are others than these
    kernels take. finish: of one matrix and few rows, in place of the residual's norm."""
    split = [_parts(each) for each in packed]
    every = [part for parts in split for part in parts or ()]
    numbers = x.numbers if isinstance(x, PreparedRows) else x
    if None in split or not (parts_of(packed) or all_small(every)):
        return None
    if numbers.shape[:-1].numel() > FEW_ROWS and not invariant:
        return None
    launch = ProductLaunch(x, every, invariant)
    y = _launched(launch, every, launch.places(every), numbers.shape, residual, finish)
    return list(y.split_with_sizes([each.shape[0] for each in packed], -1))


def _launched(
    launch: ProductLaunch,
    every: Sequence[Part],
    constants: dict[str, tuple[object, ...]],
    shape: torch.Size,
    residual: Residual | None = None,
    finish: Finish | None = None,
) -> Tensor:
    """Results side by side. constants: as ProductLaunch.places. shape: of the rows."""
    columns = [columns_of(launch.side, part.n_out) for part in every]
    places, program, column = [], 0, 0
    for part, together in zip(every, columns, strict=True):
        places.append((part.data, part.n_out, part.row_bytes, program, column))
        program += cdiv(part.n_out, together)
        column += part.n_out
    y = launch.rows.new_empty(*shape[:-1], column)
    added = launch.rows if residual is None else as_rows(residual.x)
    most = max(1, MOST_NORMED // column)
    run, then, kept = finish or norm_after(residual, launch.n_rows, most) or NO_FINISH
    _product[(program, cdiv(launch.n_rows, launch.side))](
        launch.rows, launch.rows.stride(0), launch.integers or (launch.rows,), tuple(places), y,
        added, added.stride(0), then, run and counters(y.device),
        launch.n_rows, launch.n_in, column, **constants, COLUMNS=tuple(columns),
        RESIDUAL=residual is not None, FINISH=run, KEPT=kept, BM=launch.side, num_warps=1,
    )  # fmt: skip
    return y


def products_of_columns(
    x: Tensor | PreparedRows,
    packed: Sequence[PackedWeight],
    columns: Sequence[tuple[int, PackedWeight]],
    *,
    invariant: bool = False,
) -> tuple[list[Tensor], list[Tensor]] | None:
    """See kernels.linear.linear_of_columns; None as in `products`, for many rows, and for rows of
    several lengths."""
    n_rows, matrices = x.shape[:-1].numel(), [matrix for _, matrix in columns]
    split, widths = [_parts(each) for each in matrices], {each.shape[1] for each in matrices}
    every = [part for parts in split for part in parts or ()]
    if None in split or len(widths) > 1 or any(part.type == "F32" for part in every):
        return None
    (width,) = widths
    if n_rows * width * len(columns) > MOST_NORMED:
        return None
    kinds = [parts_of([matrix]) for matrix in matrices]
    made = [empty_integers(n_rows, width, parts, every[0].data.device) for parts in kinds]
    then = tuple(
        (at, *one) for (at, _), rows in zip(columns, made, strict=True) for one in rows.values()
    )
    constants = tuple((width, *kind) for parts in kinds for kind in kinds_of(parts))
    found = products(x, packed, invariant=invariant, finish=(round_columns, then, constants))
    if found is None:
        return None
    rows = found[0][..., columns[0][0] : columns[0][0] + width]
    launch = ProductLaunch(PreparedRows(rows, made[0]), split[0] or (), invariant)
    launch.integers = tuple(tuple(one) for _, *one in then)
    places, n_before = list[int](), 0
    for parts, of_rows in zip(split, kinds, strict=True):
        places += [n_before + of_rows.index(part_of(part.type)) for part in parts or ()]
        n_before += len(of_rows)
    y = _launched(launch, every, launch.places(every, places), rows.shape)
    return found, list(y.split_with_sizes([each.shape[0] for each in matrices], -1))


def all_small(parts: Sequence[Part]) -> bool:
    """Whether f32 matrices with no blocks next to them are few enough rows for one launch."""
    return sum(part.n_out for part in parts) <= SMALL


def opened(
    x: Tensor | PreparedRows,
    packed: PackedWeight,
    expression: str,
    constants: tuple[float, ...],
    *,
    reads: Sequence[PackedWeight] = (),
    invariant: bool = False,
) -> Rows | None:
    """The expression of this name of the two halves of a product, as kernels.linear.gated_linear
    has it; None as in `products`."""
    parts, numbers = _parts(packed), x.numbers if isinstance(x, PreparedRows) else x
    if parts is None or not parts_of([packed]):
        return None
    if numbers.shape[:-1].numel() > FEW_ROWS and not invariant:
        return None
    width = packed.shape[0] // 2
    if len(parts) == 1:
        (whole,) = parts
        halves = [whole._replace(data=data, n_out=width) for data in whole.data.chunk(2)]
    elif [part.n_out for part in parts] == [width, width]:
        halves = parts
    else:
        return None
    launch = ProductLaunch(x, halves, invariant)
    columns = columns_of(launch.side, width, MOST_COLUMNS // 2)
    y = numbers.new_empty(*numbers.shape[:-1], width)
    kinds, tiles = parts_of(reads), cdiv(launch.n_rows, launch.side)
    if any(width % side for side, _ in kinds_of(kinds)) or tiles * cdiv(width, LONG) > COUNTERS:
        kinds = ()
    made = empty_integers(launch.n_rows, width, kinds, y.device)
    _opened[(cdiv(width, columns), tiles)](
        launch.rows, launch.rows.stride(0), launch.integers,
        tuple((part.data, part.row_bytes) for part in halves), y, constants,
        tuple(map(tuple, made.values())), counters(y.device) if kinds else y,
        launch.n_rows, launch.n_in, width,
        **launch.places(halves), EXPRESSION=EXPRESSIONS[expression], KEPT=kinds_of(kinds),
        BM=launch.side, BN=columns, num_warps=1,
    )  # fmt: skip
    return PreparedRows(y, made) if made else y


def integer_linear(x: Tensor, blocks: Tensor, type: str, *, invariant: bool = False) -> Tensor:
    rows, n_out = as_rows(x), blocks.shape[0]
    if len(rows) > FEW_ROWS and not invariant:
        return expanded_product(rows, blocks, type, torch.bfloat16).view(*x.shape[:-1], n_out)
    packed = PackedWeight("q8", (n_out, x.shape[-1]), 0, BlockData(blocks, type))
    found = products(x, [packed], invariant=invariant)
    assert found is not None  # of blocks
    return found[0]


def columns_of(side: int, n_out: int, most: int = MOST_COLUMNS) -> int:
    """Rows of weights in a program, of as many rows of x: neither changes a bit. most: numbers in
    a tile."""
    return max(1, min(most // side, power_of_2(n_out // LEAST_PROGRAMS + 1)))
