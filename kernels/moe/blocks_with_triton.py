"""Experts in the blocks of their file on a GPU, as integer products: the bits of
`integer_linear_naive`, whatever rows there are.

Of few choices each is a tile of its own, and what adds up the experts of a row adds all that a
layer adds to them. Of more, those of an expert share its weights (kernels.moe.with_triton).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kernels.dispatch import COUNTERS, counters
from kernels.linear.block_linear.with_triton import FEW_ROWS
from kernels.linear.block_parts import LONG, PreparedRows, Rows
from kernels.linear.integer_blocks.rows_with_triton import (
    NO_FINISH,
    empty_integers,
    finish_when_done,
    kinds_of,
    norm_after,
    part_of,
)
from kernels.linear.integer_blocks.with_triton import (
    MAX_ROWS,
    Part,
    ProductLaunch,
    block_sums,
    columns_of,
    round_when_done,
)
from kernels.moe import Added
from kernels.moe.packed import PackedExperts
from kernels.moe.with_triton import added_to, combine, in_order, places_of, tile_of
from kernels.pointwise.with_triton import EXPRESSIONS
from kernels.triton_setup import cdiv, jit, power_of_2


@jit
def _places(ids, order, ends, n_experts, SORTED: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Of a tile the expert, the first of its places among the choices, where they end, and the
    choices that are there."""
    tile = tl.program_id(0)
    if SORTED:
        expert, first, end = tile_of(ends, n_experts, tile, BM, BE)
        place = first + tl.arange(0, BM)
        choice = tl.load(order + place, place < end, 0)
    else:
        expert, first, end = tl.load(ids + tile), tile, tile + 1
        choice = (tile + tl.arange(0, BM)).to(tl.int64)
    return expert.to(tl.int64), first, end, choice


@jit
def _open(
    rows, parts, ids, order, ends, hidden, numbers, kept, counters, n_experts, n_used, n_in, width,
    TYPES: tl.constexpr, LAYOUTS: tl.constexpr, ROWS: tl.constexpr, EXPRESSION: tl.constexpr,
    KEPT: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """BN columns of what opens the expert of a tile, by places; rounded if any are KEPT. parts: of
    gate and up the weights, bytes of an expert and of a row."""
    expert, first, end, choice = _places(ids, order, ends, n_experts, SORTED, BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside, m = place < end, choice // n_used
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    in_columns = n < width
    weights, expert_bytes, row_bytes = parts[0]
    opened = block_sums(
        weights + expert * expert_bytes, rows[ROWS[0]], m, inside, n, in_columns, row_bytes, n_in,
        TYPES[0], LAYOUTS, 0, BM, BN,
    )  # fmt: skip
    if len(TYPES) == 2:
        weights, expert_bytes, row_bytes = parts[1]
        up = block_sums(
            weights + expert * expert_bytes, rows[ROWS[1]], m, inside, n, in_columns, row_bytes,
            n_in, TYPES[1], LAYOUTS, 1, BM, BN,
        )  # fmt: skip
        opened = EXPRESSION(opened, up, *numbers)
    else:
        opened = EXPRESSION(opened)
    to = hidden + place.to(tl.int64)[:, None] * width + n[None]
    tl.store(to, opened, inside[:, None] & in_columns[None])
    if len(KEPT) > 0:
        first_row = first.to(tl.int64)
        last_row = tl.minimum(first_row + BM, end)
        round_when_done(
            hidden, kept, counters, tl.program_id(0), first_row, last_row, tl.program_id(1) * BN,
            width, KEPT, BN,
        )  # fmt: skip


@jit
def _close(
    rows, weights, expert_bytes, row_bytes, order, ends, lines, n_experts, width, n_out,
    TYPES: tl.constexpr, LAYOUTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """down of the places of a tile, in the order of the choices."""
    expert, first, end, choice = _places(order, order, ends, n_experts, True, BM, BE)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    inside = place < end
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    in_columns = n < n_out
    total = block_sums(
        weights + expert * expert_bytes, rows, place.to(tl.int64), inside, n, in_columns,
        row_bytes, width, TYPES[0], LAYOUTS, 0, BM, BN,
    )  # fmt: skip
    to = lines + choice[:, None] * n_out + n[None]
    tl.store(to, total, inside[:, None] & in_columns[None])


@jit
def _close_row(
    rows, weights, expert_bytes, row_bytes, ids, shares, y, added, then, counters, n_used, width,
    n_out, TYPES: tl.constexpr, LAYOUTS: tl.constexpr, FINISH: tl.constexpr, KEPT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The sum over a row's choices of its share times down, and what is added. FINISH: what else
    becomes of rows, or None."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_columns = n < n_out
    total = tl.zeros((1, BN), tl.float32)
    for i in range(n_used):
        place = row * n_used + i
        line = block_sums(
            weights + tl.load(ids + place) * expert_bytes, rows, place + tl.arange(0, 1),
            tl.arange(0, 1) == 0, n, in_columns, row_bytes, width, TYPES[0], LAYOUTS, 0, 1, BN,
        )  # fmt: skip
        total += tl.load(shares + place) * line
    total = added_to(total, added, row, n[None], in_columns[None])
    tl.store(y + row * n_out + n[None], total, in_columns[None])
    if FINISH is not None:
        finish_when_done(
            y, then, counters + row, tl.num_programs(0), row, row + 1, n_out, FINISH, KEPT
        )


def experts(x: Rows, weights: Tensor, ids: Tensor, packed: PackedExperts, added: Added) -> Tensor:
    *first, down = packed.data
    n_experts, width, n_out = packed.shape
    n_rows, n_used = ids.shape
    n_choices, kind = ids.numel(), part_of(down.type)
    ids, weights = ids.contiguous(), weights.contiguous()
    opening = [Part(part.bytes, width, part.bytes.stride(1), part.type) for part in first]
    launch = ProductLaunch(x, opening, invariant=False)

    is_sorted = n_rows > 1 and n_choices > n_experts
    order, ends, side = ids, ids, 1
    n_tiles = n_choices
    if is_sorted:
        order, ends = in_order(ids, n_experts)
        side = min(power_of_2(cdiv(n_choices, n_experts)), MAX_ROWS)
        n_tiles = min(n_tiles, min(n_choices, n_experts) + n_choices // side)
    sides = {"BM": side, "BE": power_of_2(n_experts), "num_warps": 1}
    kinds = (kind,) if n_tiles * cdiv(width, LONG) <= COUNTERS else ()
    columns = columns_of(side, width * n_tiles, 4)
    hidden = torch.empty(n_choices, width, device=ids.device)
    made = empty_integers(n_choices, width, kinds, ids.device)
    _open[(n_tiles, cdiv(width, columns))](
        launch.integers, tuple((p.data, p.data.stride(0), p.row_bytes) for p in opening),
        ids, order, ends, hidden, packed.activation.numbers, tuple(map(tuple, made.values())),
        counters(ids.device) if kinds else hidden, n_experts, n_used, launch.n_in, width,
        **launch.places(opening), EXPRESSION=EXPRESSIONS[packed.activation.kind],
        KEPT=kinds_of(kinds), SORTED=is_sorted, BN=columns, **sides,
    )  # fmt: skip
    closing = Part(down.bytes, n_out, down.bytes.stride(1), down.type)
    last = ProductLaunch(PreparedRows(hidden, made), [closing], invariant=False)
    places = last.places([closing])
    del places["ROWS"]
    given = last.integers[0], down.bytes, down.bytes.stride(0), closing.row_bytes
    if not is_sorted:
        y, columns = hidden.new_empty(n_rows, n_out), columns_of(1, n_out * n_rows)
        run, then, kept = norm_after(added[2], n_rows, FEW_ROWS) or NO_FINISH
        _close_row[(cdiv(n_out, columns), n_rows)](
            *given, ids, weights, y, places_of(added), then, run and counters(y.device),
            n_used, width, n_out, **places, FINISH=run, KEPT=kept, BN=columns, num_warps=1,
        )  # fmt: skip
        return y
    lines = hidden.new_empty(n_choices, n_out)
    columns = columns_of(side, n_out * n_tiles)
    _close[(n_tiles, cdiv(n_out, columns))](
        *given, order, ends, lines, n_experts, width, n_out, **places, BN=columns, **sides
    )
    return combine(lines, weights, added)
