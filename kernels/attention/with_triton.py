"""Attention of few queries on a GPU: the cells split over programs, their parts then combined.

After flash-decoding (Dao et al. 2023): a program reads the keys and values of one split for all
query heads of a key/value head and all tokens, ROWS at a time, and leaves its largest score, the
sum of its weights and its weighted values; a second kernel adds the splits up. Tile sides depend
on the head dim and the split on the number of cells alone, so a query's bits do not depend on the
tokens and sequences that came with it. Products are plain f32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton.language as tl
from torch import Tensor

from kernels.attention import FEW_TOKENS, AttendArguments, attend_grouped, attend_with_torch
from kernels.linear.block_linear.with_triton import FEW_ROWS
from kernels.linear.block_parts import IntegerRows, PreparedRows, Rows
from kernels.linear.integer_blocks.rows_with_triton import (
    empty_integers,
    kinds_of,
    parts_of,
    store_row,
)
from kernels.linear.packed import PackedWeight
from kernels.pointwise.with_triton import EXPRESSIONS
from kernels.triton_setup import LEAST_DEPTH, as_rows, cdiv, jit, power_of_2

# A product over CHUNK numbers of a head at a time and tiles of few cells keep its operands in
# registers, and the tiles of head dim 256 within 48 KiB of shared memory.
ROWS, CELLS, CHUNK = 16, 16, 64
# cells of a split: four tiles, and more of them once there are splits enough for any device
LEAST_CELLS, MOST_SPLITS = 64, 64
# scores of a prompt that torch keeps at once: 256 MiB, twice more while they become weights
MOST_SCORES = 1 << 26
# numbers of a key: those of latent attention leave no room in registers
WIDEST = 256
_GATED = EXPRESSIONS["output_gate"]


@jit
def _chunks(BD: tl.constexpr, BC: tl.constexpr):
    """The places 0 .. BD - 1 of a head, BC in a row."""
    return tl.arange(0, BD // BC)[:, None] * BC + tl.arange(0, BC)[None, :]


@jit(do_not_specialize_on_alignment=["n_tokens", "n_cells"])
def _split(
    q, k, v, mask, o, most, total,
    n_tokens, n_cells, n_heads, n_kv_heads, d, d_v, split_cells, scale,
    q_b, q_t, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_t, mask_n,
    BR: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    split, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    i, repeat = tl.program_id(1) % n_kv_heads, n_heads // n_kv_heads
    # the query heads of a token side by side
    row = tl.program_id(1) // n_kv_heads * BR + tl.arange(0, BR)
    t, h = row // repeat, i * repeat + row % repeat
    in_rows = t < n_tokens
    columns, deep = tl.arange(0, BV), _chunks(BD, BC)
    q += b * q_b + t[:, None] * q_t + h[:, None] * q_h
    # the cells of long contexts are more numbers than 32 bits count
    k += b * k_b + i.to(tl.int64) * k_h
    v += b * v_b + i.to(tl.int64) * v_h
    mask += b * mask_b + t[:, None] * mask_t
    queries = tl.load(
        q[None] + deep[:, None, :] * q_d, in_rows[None, :, None] & (deep < d)[:, None, :], 0.0
    )

    best = tl.full((BR,), float("-inf"), tl.float32)
    weight = tl.zeros((BR,), tl.float32)
    values = tl.zeros((BR, BV), tl.float32)
    first = split * split_cells
    for start in range(first, tl.minimum(first + split_cells, n_cells), BN):
        n = (start + tl.arange(0, BN)).to(tl.int64)
        inside = in_rows[:, None] & (n < n_cells)[None, :]
        visible = tl.load(mask + n[None, :] * mask_n, inside, 0) != 0
        # cells that no row sees are never read; a tile of them is passed over
        seen = tl.max(visible.to(tl.int32), 0) > 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            # both on their way before either is used
            keys = tl.load(
                k + n[None, None, :] * k_n + deep[:, :, None] * k_d,
                seen[None, None, :] & (deep < d)[:, :, None], 0.0,
            )  # fmt: skip
            rows = tl.load(
                v + n[:, None] * v_n + columns[None, :] * v_d,
                seen[:, None] & (columns < d_v)[None, :], 0.0,
            )  # fmt: skip
            scores = tl.sum(tl.dot(queries, keys, input_precision="ieee"), 0)
            scores = tl.where(visible, scores * scale, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            # a row that has seen nothing yet: weights of e^-inf, not of e^(-inf + inf)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, rescale = tl.exp(scores - base[:, None]), tl.exp(best - base)
            best = higher
            weight = weight * rescale + tl.sum(weights, 1)
            values = tl.dot(weights, rows, values * rescale[:, None], input_precision="ieee")

    place = ((b * tl.num_programs(0) + split) * n_tokens + t) * n_heads + h
    tl.store(most + place, best, in_rows)
    tl.store(total + place, weight, in_rows)
    some = in_rows & (weight > 0)
    tl.store(
        o + place[:, None] * d_v + columns[None, :],
        values,
        some[:, None] & (columns < d_v)[None, :],
    )


@jit(do_not_specialize_on_alignment=["n_tokens", "n_cells"])
def _split_alone(
    q, k, v, cells, counts, o, most, total,
    n_tokens, n_cells, n_heads, n_kv_heads, d, d_v, scale,
    q_b, q_t, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    LEAST: tl.constexpr, MOST: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A split of one query's visible cells, in their order; how many it has depends on their
    number alone."""
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, h = row // n_heads, row % n_heads
    i = h // (n_heads // n_kv_heads)
    count = tl.load(counts + b * n_tokens + t).to(tl.int32)
    size = LEAST
    while size * MOST < count:
        size *= 2
    deep, columns = tl.arange(0, BD), tl.arange(0, BV)
    query = tl.load(q + b * q_b + t * q_t + h * q_h + deep * q_d, deep < d, 0.0) * scale
    k += b * k_b + i.to(tl.int64) * k_h
    v += b * v_b + i.to(tl.int64) * v_h
    cells += (b * n_tokens + t) * n_cells

    best = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    values = tl.zeros((BV,), tl.float32)
    first = split * size
    for start in range(first, tl.minimum(first + size, count), BN):
        at = start + tl.arange(0, BN)
        seen = at < count
        n = tl.load(cells + at, seen, 0).to(tl.int64)
        keys = tl.load(
            k + n[:, None] * k_n + deep[None, :] * k_d, seen[:, None] & (deep < d)[None, :], 0.0
        )
        rows = tl.load(
            v + n[:, None] * v_n + columns[None, :] * v_d,
            seen[:, None] & (columns < d_v)[None, :], 0.0,
        )  # fmt: skip
        scores = tl.where(seen, tl.sum(keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        weights, rescale = tl.exp(scores - higher), tl.exp(best - higher)
        best = higher
        weight = weight * rescale + tl.sum(weights, 0)
        values = values * rescale + tl.sum(weights[:, None] * rows, 0)

    place = (b * tl.num_programs(0) + split) * n_tokens * n_heads + row
    tl.store(most + place, best)
    tl.store(total + place, weight)
    tl.store(o + place * d_v + columns, values, columns < tl.where(weight > 0, d_v, 0))


@jit(do_not_specialize_on_alignment=["n_rows", "n_splits"])
def _combine(
    o, most, total, sinks, gate, y, kept, n_rows, n_splits, n_heads, d, gate_t,
    BS: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """BH heads of a token: what its splits left, on the scale of the largest score, times the
    sigmoid of the gate if there is one; rounded if any are KEPT, then a program has whole heads."""
    first, b = tl.program_id(0) * BH, tl.program_id(2).to(tl.int64)
    row, splits = first + tl.arange(0, BH), tl.arange(0, BS)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    place = (b * n_splits + splits)[:, None] * n_rows + row[None]
    inside, in_columns = (splits < n_splits)[:, None], columns < d
    best = tl.load(most + place, inside, float("-inf"))
    highest = tl.max(best, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % n_heads)
        highest = tl.maximum(highest, sink)
    weight = tl.sum(tl.load(total + place, inside, 0.0) * tl.exp(best - highest[None]), 0)
    if sinks is not None:
        weight += tl.exp(sink - highest)
    values = tl.zeros((BH, BC), tl.float32)
    # 16 at a time stay in registers
    for start in range(0, n_splits, 16):
        some = start + tl.arange(0, 16)
        of_some = (b * n_splits + some)[:, None] * n_rows + row[None]
        largest = tl.load(most + of_some, (some < n_splits)[:, None], float("-inf"))
        # a split that the row sees nothing of holds no values
        read = (largest > float("-inf"))[:, :, None] & in_columns[None, None]
        parts = tl.load(o + of_some[:, :, None] * d + columns[None, None], read, 0.0)
        values += tl.sum(parts * tl.exp(largest - highest[None])[:, :, None], 0)
    values = values / weight[:, None]
    token = b * (n_rows // n_heads) + first // n_heads
    column = (row % n_heads)[:, None] * d + columns[None]
    if gate is not None:
        opened = tl.load(gate + token * gate_t + column, in_columns[None], 0.0)
        values = _GATED(values, opened)
    tl.store(y + token * n_heads * d + column, values, in_columns[None])
    if len(KEPT) > 0:
        store_row(
            tl.reshape(values, (BH * BC,)), kept, token, first % n_heads * d, n_heads * d, True,
            KEPT, BH * BC,
        )  # fmt: skip


def attend(*inputs: *AttendArguments) -> Tensor:
    """See kernels.attention.attend. Many queries, as of a prompt, and long keys run in torch."""
    q, k, v, mask, scale, sinks = inputs
    parts = _splits(q, k, v, mask, scale)
    if parts is not None:
        return _combined(*parts, sinks, q.shape[2])[0]
    if (n := max(1, MOST_SCORES // (len(q) * q.shape[2] * k.shape[2]))) >= q.shape[1]:
        return attend_with_torch(*inputs)
    some = zip(q.split(n, 1), mask.split(n, 1), strict=True)
    return torch.cat([attend_grouped(x, k, v, seen, scale, sinks) for x, seen in some], 1)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    gate: Tensor | None,
    reads: Iterable[PackedWeight],
    *,
    invariant: bool,
) -> Rows | None:
    """See kernels.attention.attend_rows; None for queries that `attend` leaves to torch."""
    if q.shape[1] > FEW_TOKENS:
        return None
    parts = (_splits_alone if invariant else _splits)(q, k, v, mask, q.shape[3] ** -0.5)
    if parts is None:
        return None
    y, integers = _combined(*parts, None, q.shape[2], gate, reads)
    return PreparedRows(y.flatten(2), integers) if integers else y.flatten(2)


Parts = tuple[Tensor, Tensor, Tensor]
"""What splits leave: values [B, splits, T * heads, d], largest scores and sums, without d."""


def _splits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Parts | None:
    """None for queries that torch takes."""
    n_batch, n_tokens, n_heads, d = q.shape
    if n_tokens > FEW_TOKENS or d > WIDEST:
        return None
    n_kv_heads, n_cells, d_v = v.shape[1:]
    size = cells_per_split(n_cells)
    n_splits = cdiv(n_cells, size)
    n_rows = n_tokens * n_heads
    o = q.new_empty(n_batch, n_splits, n_rows, d_v)
    most, total = q.new_empty(2, n_batch, n_splits, n_rows).unbind(0)
    width, v_width = (max(power_of_2(side), 2 * LEAST_DEPTH) for side in (d, d_v))
    chunk = min(width // 2, CHUNK)
    tiles = cdiv(n_rows // n_kv_heads, ROWS)
    _split[(n_splits, tiles * n_kv_heads, n_batch)](
        q, k, v, mask, o, most, total,
        n_tokens, n_cells, n_heads, n_kv_heads, d, d_v, size, scale,
        *q.stride(), *k.stride(), *v.stride(), *mask.stride(),
        BR=ROWS, BN=CELLS, BC=chunk, BD=width, BV=v_width, num_warps=4, num_stages=1,
    )  # fmt: skip
    return o, most, total


def attend_invariant(*inputs: *AttendArguments) -> Tensor:
    """See kernels.attention.attend with `invariant`: each query by itself."""
    q, k, v, mask, scale, sinks = inputs
    if q.shape[1] > FEW_TOKENS:  # a split of every query is kept until all are there
        parts = zip(q.split(FEW_TOKENS, 1), mask.split(FEW_TOKENS, 1), strict=True)
        return torch.cat([attend_invariant(x, k, v, seen, scale, sinks) for x, seen in parts], 1)
    return _combined(*_splits_alone(q, k, v, mask, scale), sinks, q.shape[2])[0]


def _splits_alone(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Parts:
    n_batch, n_tokens, n_heads, d = q.shape
    n_kv_heads, n_cells, d_v = v.shape[1:]
    cells = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    counts = mask.sum(-1)
    n_splits, n_rows = min(MOST_SPLITS, power_of_2(cdiv(n_cells, LEAST_CELLS))), n_tokens * n_heads
    o = q.new_empty(n_batch, n_splits, n_rows, d_v)
    most, total = q.new_empty(2, n_batch, n_splits, n_rows).unbind(0)
    width, v_width = power_of_2(d), power_of_2(d_v)
    _split_alone[(n_splits, n_rows, n_batch)](
        q, k, v, cells, counts, o, most, total,
        n_tokens, n_cells, n_heads, n_kv_heads, d, d_v, scale,
        *q.stride(), *k.stride(), *v.stride(),
        LEAST=LEAST_CELLS, MOST=MOST_SPLITS, BN=8, BD=width, BV=v_width, num_warps=4,
    )  # fmt: skip
    return o, most, total


def _combined(
    o: Tensor,
    most: Tensor,
    total: Tensor,
    sinks: Tensor | None,
    n_heads: int,
    gate: Tensor | None = None,
    reads: Iterable[PackedWeight] = (),
) -> tuple[Tensor, dict[int, IntegerRows]]:
    """f32 [B, T, heads, d], and its rows as integers for `reads` where heads fill whole blocks."""
    n_batch, n_splits, n_rows, d = o.shape
    y = o.new_empty(n_batch, n_rows // n_heads, n_heads, d)
    chunk, together, n_in = min(power_of_2(d), CHUNK), 1, n_heads * d
    parts = parts_of(reads) if n_batch * y.shape[1] <= FEW_ROWS else ()
    sides = [side for side, _ in kinds_of(parts)]
    if d != power_of_2(d) or d > WIDEST or any(n_in % side for side in sides):
        parts = ()
    if parts:
        chunk, together = d, max(1, max(sides) // d)
    made = empty_integers(n_batch * y.shape[1], n_in, parts, o.device)
    gates = None if gate is None else as_rows(gate)
    _combine[(n_rows // together, cdiv(d, chunk), n_batch)](
        o, most, total, sinks, gates, y, tuple(map(tuple, made.values())),
        n_rows, n_splits, n_heads, d, 0 if gates is None else gates.stride(0),
        BS=MOST_SPLITS, BH=together, BC=chunk, KEPT=kinds_of(parts), num_warps=4,
    )  # fmt: skip
    return y, made


def cells_per_split(n_cells: int) -> int:
    """A power of two, so that a growing cache seldom changes it; MOST_SPLITS splits at most."""
    return max(LEAST_CELLS, power_of_2(cdiv(n_cells, MOST_SPLITS)))
