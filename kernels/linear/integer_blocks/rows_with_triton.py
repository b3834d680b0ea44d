"""Rows of x as integers on a GPU (kernels.linear.block_parts), rounded where they are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton.language as tl
from torch import Tensor

from kernels.linear.block_linear.with_triton import FEW_ROWS
from kernels.linear.block_parts import (
    LONG,
    SHORT,
    IntegerRows,
    PreparedRows,
    Residual,
    Rows,
    is_long,
)
from kernels.linear.packed import BlockData, PackedWeight
from kernels.pointwise.with_triton import EXPRESSIONS
from kernels.triton_setup import as_rows, cdiv, jit

WORDS_OF_GROUP = {"Q4_K": 8, "Q5_K": 8, "IQ4_XS": 8}
"""Words that share a scale in long blocks; 4 in other types."""

MOST_NORMED = 4096
"""Numbers of rows that the last program of a product norms with its single warp, one row after the
other, or one row of any length. More are a launch of its own, where each row is a program of four
warps, with the same bits. Not measured: small launches took 3 us each on an H100, and this is what
one warp is thought to do in about that time."""

_ROUND = tl.constexpr(1.5 * 2**23)
"""A number this large has no digits after the point: adding it rounds, ties to even."""
_SUMMED = tl.constexpr(512)
"""Sums of squares of a row side by side, which with one warp take no more registers than leave room
for as many programs as a product has."""
_MAGNITUDE = tl.constexpr(2**31 - 1)


@jit
def store_integers(
    values, integers, scales, sums, row, block, n_blocks, inside,
    SIDE: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Blocks of SIDE numbers of a row, values [BLOCKS, SIDE], of which `inside` are there. sums:
    int32 of every PART numbers; with PART 0 f32 of each block, times its scale."""
    # by the bits, among which NaN's are the largest
    bits = values.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    most = tl.full((BLOCKS,), 127.0, tl.float32)
    factor = tl.div_rn(most, largest)
    steps = values * factor[:, None]
    steps = tl.where(tl.abs(steps) < float("inf"), steps, 0.0)
    whole = ((steps + _ROUND) - _ROUND).to(tl.int32)
    block += row * n_blocks
    at = block[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(integers + at, whole.to(tl.int8), inside[:, None])
    if PART > 0:
        scale = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), factor)
        parts = tl.sum(tl.reshape(whole, (BLOCKS, SIDE // PART, PART)), 2)
        part = block[:, None] * (SIDE // PART) + tl.arange(0, SIDE // PART)[None, :]
        tl.store(sums + part, parts, inside[:, None])
    else:
        exact = tl.div_rn(largest, most)
        scale = exact.to(tl.float16).to(tl.float32)
        total = (exact * tl.sum(whole, 1).to(tl.float32)).to(tl.float16).to(tl.float32)
        tl.store(sums + block, total, inside)
    tl.store(scales + block, scale, inside)


@jit
def store_row(values, kept, row, first, n_in, inside, KEPT: tl.constexpr, N: tl.constexpr):
    """N numbers of a row from `first` on, of which those before n_in are there, as integers of
    each kind asked for. kept: integers, scales and sums of each; KEPT: its SIDE and PART."""
    for i in tl.static_range(len(KEPT)):
        integers, scales, sums = kept[i]
        _store_kind(
            values, integers, scales, sums, row, first, n_in, inside, KEPT[i][0], KEPT[i][1], N
        )


@jit
def _store_kind(
    values, integers, scales, sums, row, first, n_in, inside,
    SIDE: tl.constexpr, PART: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = N // SIDE
    block = first // SIDE + tl.arange(0, BLOCKS)
    n_blocks = n_in // SIDE
    store_integers(
        tl.reshape(values, (BLOCKS, SIDE)), integers, scales, sums, row, block, n_blocks,
        inside & (block < n_blocks), SIDE, BLOCKS, PART,
    )  # fmt: skip


@jit
def sum_in_pairs(values):
    """The sum of up to 4096 numbers, neighbours first: a sum by Triton has an order that follows
    the warps and the layout."""
    for _ in tl.static_range(12):
        if values.shape[0] > 1:
            first, second = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
            values = first + second
    return tl.sum(values, 0)


@jit
def norm_row(x, x_row, weight, y, kept, row, d, eps, KEPT: tl.constexpr, N: tl.constexpr):
    """The RMS norm of a row of d numbers of x, as numbers in y and, N at a time, as integers of
    each kind asked for. Squares are added up in one order, whatever N is and how many warps.

    What other programs of a launch have stored is in the second cache, but not in the first one of
    this multiprocessor, which may hold what was there before: hence .cg."""
    x += row * x_row
    squares = tl.zeros((_SUMMED,), tl.float32)
    for first in range(0, d, _SUMMED):
        at = first + tl.arange(0, _SUMMED)
        values = tl.load(x + at, at < d, 0.0, cache_modifier=".cg")
        squares += values * values
    scale = 1.0 / tl.sqrt(sum_in_pairs(squares) / d + eps)
    at = tl.arange(0, N)
    later = tl.load(x + at, at < d, 0.0, cache_modifier=".cg")
    for first in range(0, d, N):
        # the next numbers are on their way while these are rounded
        values, at = later * scale, first + N + tl.arange(0, N)
        later = tl.load(x + at, at < d, 0.0, cache_modifier=".cg")
        at = first + tl.arange(0, N)
        values *= tl.load(weight + at, at < d, 0.0)
        tl.store(y + row * d + at, values, at < d)
        store_row(values, kept, row, first, d, True, KEPT, N)


@jit
def is_last(counter, n_programs):
    """Whether this is the last of n programs to come here, which sees what all have stored.
    None waits, and the counter is zero again for the next launch, or replay, without a launch that
    sets it."""
    # what all threads stored is there for the one that sees the count (PTX: cumulativity)
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == n_programs - 1
    if last:
        tl.debug_barrier()
        tl.store(counter, 0)
    return last


@jit
def finish_when_done(
    y, then, counter, n_programs, first_row, last_row, y_row,
    FINISH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What becomes of rows of y in the last of the programs that store them: see `Finish`."""
    if is_last(counter, n_programs):
        for row in range(first_row, last_row):
            FINISH(y, then, row, y_row, KEPT)


@jit
def _norm(y, then, row, d, KEPT: tl.constexpr):
    """then: weight, normed rows, what is kept, eps."""
    weight, normed, kept, eps = then
    norm_row(y, d, weight, normed, kept, row, d, eps, KEPT, _SUMMED)


@jit
def round_columns(y, then, row, y_row, KEPT: tl.constexpr):
    """Rows for further products out of a row of results. then: of each the first column, and of one
    kind integers, scales and sums; KEPT: its length, SIDE and PART."""
    for i in tl.static_range(len(KEPT)):
        column, integers, scales, sums = then[i]
        _round_some(
            y + row * y_row + column, integers, scales, sums, row,
            KEPT[i][0], KEPT[i][1], KEPT[i][2],
        )  # fmt: skip


@jit
def _round_some(
    x, integers, scales, sums, row, WIDTH: tl.constexpr, SIDE: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    for first in range(0, WIDTH, 256):
        at = first + tl.arange(0, 256)
        values = tl.load(x + at, at < WIDTH, 0.0, cache_modifier=".cg")
        _store_kind(values, integers, scales, sums, row, first, WIDTH, True, SIDE, PART, 256)


@jit
def _quantise(
    x, other, y, kept, n_in, x_row, other_row,
    EXPRESSION: tl.constexpr, KEPT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N numbers of a row, or what an expression makes of one or two rows."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * N
    at = first + tl.arange(0, N)
    values = tl.load(x + row * x_row + at, at < n_in, 0.0).to(tl.float32)
    if EXPRESSION is not None:
        if other is None:
            values = EXPRESSION(values)
        else:
            values = EXPRESSION(values, tl.load(other + row * other_row + at, at < n_in, 0.0))
        tl.store(y + row * n_in + at, values, at < n_in)
    store_row(values, kept, row, first, n_in, True, KEPT, N)


def part_of(type: str) -> int:
    """Numbers that share a sum in rows for weights of a type; 0 for short blocks. Rows that no
    minimum meets serve in either."""
    if not is_long(type):
        return 0
    return 16 if type == "Q2_K" else 32


def parts_of(reads: Iterable[PackedWeight]) -> tuple[int, ...]:
    """All that products with these matrices need of rows."""
    return tuple(
        dict.fromkeys(
            part_of(each.data.type)
            for packed in reads
            for each in (packed.data if packed.mode == "parts" else (packed,))
            if each.mode == "q8" and isinstance(each.data, BlockData)
        )
    )


def kinds_of(parts: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """KEPT of `store_row`."""
    return tuple((LONG if part else SHORT, part) for part in parts)


def empty_integers(
    n_rows: int, n_in: int, parts: Sequence[int], device: torch.device
) -> dict[int, IntegerRows]:
    """Memory for integers int8 [n, in], scales f32 [n, blocks] and sums, by what they are of."""
    made = {}
    for part, (side, _) in zip(parts, kinds_of(parts), strict=True):
        scales = torch.empty(n_rows, n_in // side, device=device)
        sums = torch.empty(
            n_rows,
            n_in // (part or side),
            dtype=torch.int32 if part else torch.float32,
            device=device,
        )
        integers = torch.empty(n_rows, n_in, dtype=torch.int8, device=device)
        made[part] = IntegerRows(integers, scales, sums)
    return made


Finish = tuple[object, tuple[object, ...], tuple[object, ...]]
"""What the last program does to a row of results: a function of the results, tensors and numbers of
its own, the row, the length of one, and constants; these tensors and numbers; the constants."""
NO_FINISH = None, None, ()


def norm_after(residual: Residual | None, n_rows: int, most: int) -> Finish | None:
    """The norm that a sum goes through, if there is one, and no more than `most` rows; the residual
    has what it makes of them."""
    if residual is None or residual.norm is None or n_rows > most:
        return None
    weight, eps, reads = residual.norm
    parts, d = parts_of(reads), weight.shape[0]
    made = empty_integers(n_rows, d, parts, weight.device)
    numbers = torch.empty(residual.x.shape, device=weight.device)
    residual.normed = PreparedRows(numbers, made) if made else numbers
    return _norm, (weight, numbers, tuple(map(tuple, made.values())), eps), kinds_of(parts)


def integer_rows(x: Tensor, parts: Sequence[int]) -> dict[int, IntegerRows]:
    """Rows f32 [..., in] as integers, for products of these kinds."""
    return _run(as_rows(x), None, None, None, parts)


def operation_rows(
    name: str, operands: Sequence[Tensor], reads: Iterable[PackedWeight]
) -> Rows | None:
    """See kernels.linear.operation_rows; None where the products take rows as they are."""
    parts, shape = parts_of(reads), operands[0].shape
    n_in, n_rows = shape[-1], shape[:-1].numel()
    if not parts or n_rows > FEW_ROWS or any(n_in % side for side, _ in kinds_of(parts)):
        return None
    x, *others = map(as_rows, operands)
    y = operands[0].new_empty(shape)
    made = _run(x, others[0] if others else None, y, EXPRESSIONS[name], parts)
    return PreparedRows(y, made)


def _run(
    x: Tensor, other: Tensor | None, y: Tensor | None, expression: object, parts: Sequence[int]
) -> dict[int, IntegerRows]:
    n_rows, n_in = x.shape
    made, together = empty_integers(n_rows, n_in, parts, x.device), 4 * LONG
    _quantise[(n_rows, cdiv(n_in, together))](
        x, other, y, tuple(map(tuple, made.values())), n_in,
        x.stride(0), 0 if other is None else other.stride(0),
        EXPRESSION=expression, KEPT=kinds_of(parts), N=together, num_warps=4,
    )  # fmt: skip
    return made
