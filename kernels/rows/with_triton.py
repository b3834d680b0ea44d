"""Mixed streams (kernels.rows.streams), writing to attention cells, and the record of rows of
logits (kernels.rows.record) on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from kernels.dispatch import counters
from kernels.rows import reductions
from kernels.rows.streams import N_STREAMS
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

COLUMNS = 512
"""Numbers of each stream in one program."""
RECORDED = 4096
"""Numbers of a row in one program of its record."""
MOST_TOP = 16
LEAST = tl.constexpr(reductions.LEAST)
NONE = tl.constexpr(2**31 - 1)
"""In place of an id."""


@jit
def _stream_gates(
    m, scale, base, gates, m_row, n_rounds, eps, MATRIX: tl.constexpr, N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    m += row * m_row
    gates += row * (N * (N + 2) if MATRIX else N)
    read = tl.sigmoid(tl.load(m + i) * tl.load(scale) + tl.load(base + i))
    tl.store(gates + i, read + eps)
    if MATRIX:
        gain = tl.sigmoid(tl.load(m + N + i) * tl.load(scale + 1) + tl.load(base + N + i))
        tl.store(gates + N + i, 2 * gain)
        place = 2 * N + i[:, None] * N + i[None, :]
        c = tl.load(m + place) * tl.load(scale + 2) + tl.load(base + place)
        c = tl.exp(c - tl.max(c, 1)[:, None])
        c = c / tl.sum(c, 1)[:, None] + eps
        c = c / (tl.sum(c, 0)[None, :] + eps)
        for _ in range(1, n_rounds):
            c = c / (tl.sum(c, 1)[:, None] + eps)
            c = c / (tl.sum(c, 0)[None, :] + eps)
        tl.store(gates + place, c)


@jit
def _weigh_streams(x, gates, y, d, gates_row, N: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    total = tl.zeros((BD,), tl.float32)
    for stream in tl.static_range(N):
        part = tl.load(x + (row * N + stream) * d + column, inside, 0.0)
        total += part * tl.load(gates + row * gates_row + stream)
    tl.store(y + row * d + column, total, inside)


@jit
def _advance_streams(x, y, gates, out, d, y_row, gates_row, N: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < d
    to = tl.arange(0, N)
    gates += row * gates_row + N + to
    added = tl.load(y + row * y_row + column, inside, 0.0)
    total = tl.load(gates)[:, None] * added[None, :]
    for stream in tl.static_range(N):
        part = tl.load(x + (row * N + stream) * d + column, inside, 0.0)
        total += tl.load(gates + N * (1 + stream))[:, None] * part[None, :]
    place = (row * N + to[:, None]) * d + column[None, :]
    tl.store(out + place, total, inside[None, :])


def stream_gates(m: Tensor, scale: Tensor, base: Tensor, n_rounds: int, eps: float) -> Tensor:
    rows, gates = as_rows(m), m.new_empty(m.shape)
    _stream_gates[(len(rows),)](
        rows, scale, base, gates, rows.stride(0), n_rounds, eps,
        MATRIX=m.shape[-1] > N_STREAMS, N=N_STREAMS, num_warps=1,
    )  # fmt: skip
    return gates


def weigh_streams(x: Tensor, gates: Tensor) -> Tensor:
    d, y = x.shape[-1], x.new_empty(*x.shape[:-2], x.shape[-1])
    x, gates = x.contiguous(), as_rows(gates)
    grid = len(gates), cdiv(d, COLUMNS)
    _weigh_streams[grid](x, gates, y, d, gates.stride(0), N=N_STREAMS, BD=COLUMNS, num_warps=4)
    return y


def advance_streams(x: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    d, out = x.shape[-1], x.new_empty(x.shape)
    x, y, gates = x.contiguous(), as_rows(y), as_rows(gates)
    _advance_streams[(len(y), cdiv(d, COLUMNS))](
        x, y, gates, out, d, y.stride(0), gates.stride(0), N=N_STREAMS, BD=COLUMNS, num_warps=4
    )
    return out


@jit
def _write_cells(
    pairs, streams, cells, n_tokens, BH: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """A token's heads into its cell of each storage."""
    i = tl.program_id(0).to(tl.int64)
    stream, cell = tl.load(streams + i), tl.load(cells + i)
    h, column = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    for at in tl.static_range(len(pairs)):
        storage, rows, n_heads, n_cells, d, row_b, row_t, row_h, row_d = pairs[at]
        inside = (h < n_heads) & (column < d)
        source = rows + i // n_tokens * row_b + i % n_tokens * row_t
        values = tl.load(source + h * row_h + column * row_d, inside, 0.0)
        to = storage + ((stream * n_heads + h) * n_cells + cell) * d
        tl.store(to + column, values, inside)


def write_cells(storage: Tensor, rows: Tensor, streams: Tensor, cells: Tensor) -> None:
    write_cells_each(((storage, rows),), streams, cells)


def write_cells_each(
    pairs: Sequence[tuple[Tensor, Tensor]], streams: Tensor, cells: Tensor
) -> None:
    """The same for several storages and what goes into their cells."""
    of_each = [(storage, rows, *storage.shape[1:], *rows.stride()) for storage, rows in pairs]
    heads, widths = zip(*((rows.shape[2], rows.shape[3]) for _, rows in pairs), strict=True)
    _write_cells[(streams.numel(),)](
        tuple(of_each), streams, cells, pairs[0][1].shape[1],
        BH=power_of_2(max(heads)), BD=power_of_2(max(widths)), num_warps=4,
    )  # fmt: skip


@jit
def _largest(values, ids, K: tl.constexpr, BK: tl.constexpr):
    """The K largest of values with their ids, the largest first, of equal ones that of the lowest
    id first."""
    at = tl.arange(0, BK)
    top, places = tl.full((BK,), float("-inf"), tl.float32), tl.zeros((BK,), tl.int32)
    left = ids < NONE
    for i in tl.static_range(K):
        most = tl.max(tl.where(left, values, float("-inf")), 0)
        place = tl.min(tl.where(left & (values == most), ids, NONE), 0)
        top, places = tl.where(at == i, most, top), tl.where(at == i, place, places)
        left &= ids != place
    return top, places


@jit
def _softmax(s):
    """s, LEAST at least, and e to its power. A comparison leaves NaN as it is."""
    s = tl.where(s < LEAST, LEAST, s)
    return s, tl.exp(s)


@jit
def _put_together(
    parts, asked, own, record, row, n, n_parts,
    K: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A row's record of its parts, in their order."""
    at = tl.arange(0, BK)
    i = tl.arange(0, BP)
    known = i < n_parts
    every = parts + i * (2 * BK + 4)
    values = tl.load(every[:, None] + at, known[:, None], float("-inf"), cache_modifier=".cg")
    ids = tl.load(every[:, None] + BK + at, known[:, None], 0.0, cache_modifier=".cg")
    ids = tl.where(known[:, None] & (at < K)[None], ids.to(tl.int32, bitcast=True), NONE)
    most_of_each = tl.max(values, 1)
    top, places = _largest(tl.reshape(values, BP * BK), tl.reshape(ids, BP * BK), K, BK)
    most = tl.max(top, 0)
    s, share = _softmax(most_of_each - most)
    sums = tl.load(every + 2 * BK, known, 0.0, cache_modifier=".cg")
    products = tl.load(every + 2 * BK + 1, known, 0.0, cache_modifier=".cg")
    total = tl.sum(share * sums, 0)
    product = tl.sum(share * (products + s * sums), 0)
    kept = at < K
    tl.store(record + at, tl.minimum(places, n - 1), kept)
    tl.store(record + K + at, top.to(tl.int32, bitcast=True), kept)
    record += 2 * K
    tl.store(record, total.to(tl.int32, bitcast=True))
    tl.store(record + 1, product.to(tl.int32, bitcast=True))
    larger = tl.load(every + 2 * BK + 2, known, 0.0, cache_modifier=".cg")
    tl.store(record + 2, tl.minimum(tl.min(tl.where(at == 0, places, NONE), 0), n - 1))
    tl.store(record + 3, tl.load(asked + row).to(tl.int32))
    tl.store(record + 4, tl.sum(larger, 0).to(tl.int32))
    tl.store(record + 5, own.to(tl.int32, bitcast=True))


@jit
def _row_record(
    x, asked, parts, counters, record, n, x_row, width, n_parts,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Of BN numbers of a row: the largest with their ids, sums relative to the largest, numbers
    larger than that of the token asked about. The last of a row to be done puts them together."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += row * x_row
    own = tl.load(x + tl.load(asked + row))
    column = part * BN + tl.arange(0, BN)
    inside = column < n
    values = tl.load(x + column, inside, float("-inf"))
    at, wide = tl.arange(0, BK), 2 * BK + 4
    top, places = _largest(values, tl.where(inside, column, NONE), K, BK)
    # numbers that are all infinitely unlikely add nothing
    most = tl.max(top, 0)
    s, weight = _softmax(values - tl.where(most > float("-inf"), most, 0.0))
    mine = parts + (row * n_parts + part) * wide
    tl.store(mine + at, top)
    tl.store(mine + BK + at, places.to(tl.float32, bitcast=True))
    tl.store(mine + 2 * BK, tl.sum(weight, 0))
    tl.store(mine + 2 * BK + 1, tl.sum(weight * s, 0))
    tl.store(mine + 2 * BK + 2, tl.sum((values > own).to(tl.float32), 0))
    # what all threads stored is there for the one that sees the count (PTX: cumulativity)
    tl.debug_barrier()
    n_before = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if n_before == n_parts - 1:
        tl.debug_barrier()
        _put_together(
            parts + row * n_parts * wide, asked, own, record + row * width, row, n, n_parts,
            K, BK, BP,
        )  # fmt: skip
        tl.store(counters + row, 0)


def row_record(logits: Tensor, k: int, asked: Tensor) -> Tensor:
    """See kernels.rows.record, for k up to MOST_TOP and as many rows as there are counters."""
    x, n_parts = as_rows(logits), cdiv(logits.shape[1], RECORDED)
    side, (n_rows, n) = power_of_2(k), x.shape
    width = 2 * k + 6
    parts = x.new_empty(n_rows * n_parts * (2 * side + 4))
    record = torch.empty(n_rows, width, dtype=torch.int32, device=x.device)
    _row_record[(n_rows, n_parts)](
        x, asked, parts, counters(x.device), record, n, x.stride(0), width, n_parts,
        K=k, BK=side, BN=RECORDED, BP=power_of_2(n_parts), num_warps=4,
    )  # fmt: skip
    return record
