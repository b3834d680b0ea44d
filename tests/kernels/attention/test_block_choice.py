"""Cells in the best blocks, with mean and with pooled keys: against the choice query by query,
ties, places of cells."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import block_choice as op
from kernels.attention.block_choice import Indexer
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize(
    "run",
    [op.choose_blocks, with_torch.choose_blocks, with_llvm.choose_blocks],
    ids=["op", "torch", "llvm"],
)
N_ROT, D = 4, 10


def inputs(n_held: int, n_tokens: int, n_cells: int):
    """The last n_tokens of sequences of n_held and n_held - 1 tokens, whose cells lie anywhere."""
    q = torch.randn(2, n_tokens, 3, D)
    keys = torch.randn(2, 1, n_cells, D + 6)[:, 0, :, 3 : 3 + D]
    positions = torch.randint(0, 2 * n_cells, (2, n_cells))
    mask = torch.zeros(2, n_tokens, n_cells, dtype=torch.bool)
    for b in range(2):
        cells = torch.randperm(n_cells)[: n_held - b]
        positions[b, cells] = torch.arange(n_held - b)
        for t in range(n_tokens):
            mask[b, t, cells[: n_held - b - n_tokens + 1 + t]] = True
    angle = torch.arange(n_cells)[:, None] * torch.tensor([1.0, 0.1])
    table = torch.cat((angle.cos(), angle.sin()), 1)
    return q, keys, positions, mask, torch.randn(D), table


@FAST
@pytest.mark.parametrize("n_held", [3, 17, 30])
@pytest.mark.parametrize(("ratio", "n_blocks"), [(1, 5), (3, 2), (4, 1), (8, 3)])
def test_the_choice_query_by_query(run, ratio, n_blocks, n_held):
    torch.manual_seed(ratio)
    given, indexer = inputs(n_held, 2, 33), Indexer(ratio, n_blocks, 1e-6)
    seen = run(*given, indexer)
    assert seen.dtype == torch.bool
    assert torch.equal(seen, naive.choose_blocks(*given, indexer))


@FAST
def test_of_equal_scores_the_first(run):
    q, keys, positions, mask, _, table = inputs(33, 1, 33)
    table[:, :2], table[:, 2:] = 1.0, 0.0
    order = positions.argsort(1)
    for b in range(2):
        keys[b] = -q[b, 0].sum(0) * 9
        for block in (2, 5, 7):
            keys[b, order[b, block * 4 : block * 4 + 4]] = q[b, 0, 0]
    # two heads and more score nothing: blocks 2, 5 and 7 are alike, all others 0 or less
    q[:, :, 1:] = 0
    seen = run(q, keys, positions, mask, torch.ones(D), table, Indexer(4, 2, 1e-6))
    for b, n_held in ((0, 33), (1, 32)):
        found = sorted(positions[b, seen[b, 0]].tolist())
        assert found == [8, 9, 10, 11, 20, 21, 22, 23, *range(32, n_held)]


@FAST
def test_nothing_scores(run):
    q, keys, positions, mask, weight, table = inputs(33, 1, 33)
    seen = run(q * 0, keys, positions, mask, weight, table, Indexer(4, 2, 1e-6))
    for b, n_held in ((0, 33), (1, 32)):
        assert sorted(positions[b, seen[b, 0]].tolist()) == [*range(8), *range(32, n_held)]


@pytest.mark.parametrize("run", [op.choose_blocks, with_torch.choose_blocks])
def test_a_choice_does_not_depend_on_tokens_beside_it(run):
    q, keys, positions, mask, weight, table = inputs(33, 6, 33)
    indexer = Indexer(3, 2, 1e-6)
    seen = run(q, keys, positions, mask, weight, table, indexer, invariant=True)
    for t in range(6):
        one = slice(t, t + 1)
        alone = run(q[:, one], keys, positions, mask[:, one], weight, table, indexer)
        assert torch.equal(alone, seen[:, one])


POOLS = pytest.mark.parametrize(
    "run",
    [op.choose_pools, with_torch.choose_pools, with_llvm.choose_pools],
    ids=["op", "torch", "llvm"],
)


def pool_inputs(n_held: int, n_tokens: int, n_cells: int, ratio: int):
    """Weights of heads of both signs, so that scores are, too."""
    q, _, positions, mask, *_ = inputs(n_held, n_tokens, n_cells)
    rows = torch.randn(2, 1, n_cells, 2 * D + 6)[:, 0, :, 3 : 3 + 2 * D]
    weights = torch.randn(2, n_tokens, 8)[..., 2:5]
    return q, weights, rows, positions, mask, torch.randn(ratio, D)


@POOLS
@pytest.mark.parametrize("n_held", [3, 17, 30])
@pytest.mark.parametrize(("ratio", "n_blocks"), [(2, 5), (3, 2), (4, 1), (8, 3)])
def test_pools_query_by_query(run, ratio, n_blocks, n_held):
    torch.manual_seed(ratio)
    given, indexer = pool_inputs(n_held, 2, 33, ratio), Indexer(ratio, n_blocks)
    assert torch.equal(run(*given, indexer), naive.choose_pools(*given, indexer))


@POOLS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_pool_is_chosen_by_its_gates(run, sign):
    """Each pool's key is that of its one open cell; scores are these times the weight's sign."""
    q, weights, rows, positions, mask, bias = pool_inputs(33, 1, 33, 4)
    q.fill_(1.0), weights.fill_(sign), rows.fill_(-30.0), bias.zero_()
    order = positions.argsort(1)
    for b in range(2):
        for pool in range(8):
            open_cell = order[b, 4 * pool + pool % 4]
            rows[b, open_cell, :D], rows[b, open_cell, D:] = 1.0 + (5 * pool) % 8, 30.0
    best = [3, 6] if sign > 0 else [0, 5]  # 5 * pool % 8: 0 5 2 7 4 1 6 3
    seen = run(q, weights, rows, positions, mask, bias, Indexer(4, 2))
    for b, n_held in ((0, 33), (1, 32)):
        n_whole = n_held // 4
        wanted = [4 * pool + i for pool in best for i in range(4)]
        found = sorted(positions[b, seen[b, 0]].tolist())
        assert found == [*wanted, *range(4 * n_whole, n_held)]


@pytest.mark.parametrize("run", [op.choose_pools, with_torch.choose_pools])
def test_a_choice_of_pools_does_not_depend_on_tokens_beside_it(run):
    q, weights, rows, positions, mask, bias = pool_inputs(33, 6, 33, 3)
    indexer = Indexer(3, 2)
    seen = run(q, weights, rows, positions, mask, bias, indexer, invariant=True)
    for t in range(6):
        one = slice(t, t + 1)
        given = q[:, one], weights[:, one], rows, positions, mask[:, one], bias, indexer
        assert torch.equal(run(*given, invariant=True), seen[:, one])
