"""Rows of blocks, against all tokens of a sequence at once, and the rings they are made from."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import compressor
from kernels.recurrence.compressor import Compressor
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(compressor, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, compressor], ids=["naive", "torch", "llvm", "op"]
)
PARTS = pytest.mark.parametrize("part", [Compressor(4, 20, True), Compressor(6, 9, False)])


def rows_of(x: torch.Tensor, part: Compressor) -> torch.Tensor:
    """Rows of whole blocks of a sequence [n, 2 n_channels], in float64."""
    values, scores = x.double().unflatten(0, (-1, part.ratio)).chunk(2, -1)
    if part.overlaps:
        before = [torch.roll(half[..., : part.width], 1, 0) for half in (values, scores)]
        before[1][0] = -torch.inf
        own = [half[..., part.width :] for half in (values, scores)]
        values, scores = (torch.cat(pair, 1) for pair in zip(before, own, strict=True))
    return (scores.softmax(1) * values).sum(1)


def ring_of(x: torch.Tensor, n: int, part: Compressor) -> torch.Tensor:
    ring = torch.zeros(part.n_slots, x.shape[1])
    for i in range(n):
        ring[i % part.n_slots] = x[i]
    return ring


@IMPLEMENTATIONS
@PARTS
@pytest.mark.parametrize(("start", "n"), [(0, 24), (5, 7), (11, 1), (3, 1), (16, 8)])
def test_a_row_where_a_block_ends(ops, part, start, n):
    x = torch.randn(2, 36, 2 * part.n_channels)
    starts = [start, start + 1]
    expected = torch.zeros(2, n, part.width, dtype=torch.float64)
    for b, first in enumerate(starts):
        rows = rows_of(x[b], part)
        for t in range(n):
            if (first + t) % part.ratio == part.ratio - 1:
                expected[b, t] = rows[(first + t) // part.ratio]
    new = torch.stack([x[b, first : first + n] for b, first in enumerate(starts)])
    positions = torch.tensor(starts)[:, None] + torch.arange(n)
    rings = torch.stack([ring_of(x[b], first, part) for b, first in enumerate(starts)])
    y = ops.compress(new, positions, rings, part)
    assert y.shape == expected.shape
    assert torch.equal(y == 0, expected == 0)
    if expected.any():
        assert nmse(y, expected) < 1e-12


@IMPLEMENTATIONS
@PARTS
@pytest.mark.parametrize("over", [False, True], ids=["apart", "over"])
@pytest.mark.parametrize(("n", "n_new"), [(1, 1), (3, 2), (13, 4)])
def test_rings_come_from_rows_and_go_to_rows(ops, part, n, n_new, over):
    x, starts = torch.randn(2, 40, 2 * part.n_channels), [9, 14]
    pool = torch.randn(10, part.n_slots, 2 * part.n_channels)
    read = torch.tensor([7, 2])
    for b, first in enumerate(starts):
        pool[read[b]] = ring_of(x[b], first, part)
    write = torch.tensor([[7 if over else 0, 1, 3, 4], [8, 2 if over else 9, 5, 6]])[:, :n_new]
    expected = pool.clone()
    for b, first in enumerate(starts):
        for back in range(n_new):
            expected[write[b, back]] = ring_of(x[b], first + n - back, part)
    new = torch.stack([x[b, first : first + n] for b, first in enumerate(starts)])
    positions = torch.tensor(starts)[:, None] + torch.arange(n)
    wanted = ops.compress(new, positions, pool[read], part)
    y = ops.compress_slots(new, positions, pool, read, write, part)
    assert torch.equal(y, wanted)
    assert torch.equal(pool, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("in_place", [False, True])
def test_rings_move_on_by_counts_in_memory(ops, in_place):
    part = Compressor(4, 9, True)
    x, starts = torch.randn(5, 20, 2 * part.n_channels), [4, 5, 6, 7, 8]
    counts = torch.tensor([0, 1, 3, 9, 10])
    rings = torch.stack([ring_of(x[b], first, part) for b, first in enumerate(starts)])
    expected = torch.stack(
        [ring_of(x[b], starts[b] + n, part) for b, n in enumerate(counts.tolist())]
    )
    new = torch.stack([x[b, first : first + 10] for b, first in enumerate(starts)])
    positions = torch.tensor(starts)[:, None] + torch.arange(10)
    places = compressor.ring_places(positions, part.n_slots)
    out = rings if in_place else torch.empty_like(rings)
    assert ops.fold_ring(rings, new, places, counts, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("ops", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
def test_what_goes_by_position(ops):
    x, table = torch.randn(2, 3, 40)[..., 2:-2], torch.randn(5, 36)
    positions = torch.tensor([[0, 1, 2], [4, 5, 6]])
    expected = x + table[torch.tensor([[0, 1, 2], [4, 0, 1]])]
    assert torch.equal(ops.add_at_places(x, table, positions), expected)
    if ops is not naive:
        assert ops.ring_places(positions, 4).tolist() == [[[0], [1], [2]], [[0], [1], [2]]]
        assert ops.first_of_block(positions, 4).tolist() == [[0, 0, 0], [4, 4, 4]]
