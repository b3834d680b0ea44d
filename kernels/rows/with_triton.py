"""Mixed streams (kernels.rows.sinkhorn) and writing to attention cells on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.rows.sinkhorn import N_STREAMS, Sinkhorn
from kernels.triton_setup import as_rows, cdiv, jit, power_of_2

COLUMNS = 512
"""Numbers of each stream in one program."""


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


def stream_gates(
    m: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, sinkhorn: Sinkhorn
) -> torch.Tensor:
    """See kernels.rows.sinkhorn."""
    rows, gates = as_rows(m), m.new_empty(m.shape)
    _stream_gates[(len(rows),)](
        rows, scale, base, gates, rows.stride(0), *sinkhorn,
        MATRIX=m.shape[-1] > N_STREAMS, N=N_STREAMS, num_warps=1,
    )  # fmt: skip
    return gates


def weigh_streams(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.sinkhorn."""
    d, y = x.shape[-1], x.new_empty(*x.shape[:-2], x.shape[-1])
    x, gates = x.contiguous(), as_rows(gates)
    grid = len(gates), cdiv(d, COLUMNS)
    _weigh_streams[grid](x, gates, y, d, gates.stride(0), N=N_STREAMS, BD=COLUMNS, num_warps=4)
    return y


def advance_streams(x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """See kernels.rows.sinkhorn."""
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


def write_cells(
    storage: torch.Tensor, rows: torch.Tensor, streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """See kernels.rows.cells.write_cells."""
    write_cells_each(((storage, rows),), streams, cells)


def write_cells_each(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: torch.Tensor, cells: torch.Tensor
) -> None:
    """The same for several storages and what goes into their cells."""
    of_each = [(storage, rows, *storage.shape[1:], *rows.stride()) for storage, rows in pairs]
    heads, widths = zip(*((rows.shape[2], rows.shape[3]) for _, rows in pairs), strict=True)
    _write_cells[(streams.numel(),)](
        tuple(of_each), streams, cells, pairs[0][1].shape[1],
        BH=power_of_2(max(heads)), BD=power_of_2(max(widths)), num_warps=4,
    )  # fmt: skip
