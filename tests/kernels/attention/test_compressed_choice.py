"""Cells with rows of blocks that queries see: against the choice query by query."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import compressed_choice as op
from kernels.attention.compressed_choice import BlockScores
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize(
    "run", [op.see_blocks, with_torch.see_blocks, with_llvm.see_blocks], ids=["op", "torch", "llvm"]
)


def inputs(n_held: int, n_tokens: int, n_cells: int):
    """Masks and positions of the last tokens of two sequences, whose cells lie anywhere."""
    positions = torch.randint(0, 2 * n_cells, (2, n_cells))
    seen = torch.zeros(2, n_tokens, n_cells, dtype=torch.bool)
    for b in range(2):
        cells = torch.randperm(n_cells)[: n_held - b]
        positions[b, cells] = torch.arange(n_held - b)
        for t in range(n_tokens):
            seen[b, t, cells[: n_held - b - n_tokens + 1 + t]] = True
    window = seen & (torch.rand(2, n_tokens, n_cells) < 0.5)
    return window, seen, positions


@FAST
@pytest.mark.parametrize("n_best", [None, 1, 3, 50])
@pytest.mark.parametrize(("ratio", "n_held"), [(4, 5), (4, 33), (1, 20), (7, 30)])
def test_the_choice_query_by_query(run, ratio, n_held, n_best):
    torch.manual_seed(ratio)
    given, scores = (*inputs(n_held, 3, 40), ratio), None
    if n_best:
        keys = torch.randn(2, 40, 25)[..., 2:22]
        scores = BlockScores(torch.randn(2, 3, 5, 20), torch.randn(2, 3, 5), keys, n_best)
    visible = run(*given, scores)
    assert visible.dtype == torch.bool
    assert torch.equal(visible, naive.see_blocks(*given, scores))
    assert torch.equal(visible[..., :40], given[0])


@FAST
def test_of_equal_scores_the_first(run):
    seen, positions = torch.ones(1, 1, 8, dtype=torch.bool), torch.arange(8)[None]
    q, weights = torch.ones(1, 1, 1, 2), torch.tensor([[[-1.0]]])
    keys = torch.tensor([0.0, 3, 0, -5, 0, 3, 0, -1])[None, :, None].expand(1, 8, 2)
    visible = run(seen, seen, positions, 2, BlockScores(q, weights, keys, 3))
    # scores are -6, 0, -6, 0: of the two smallest the one at the lower cell
    assert visible[0, 0, 8:].nonzero().flatten().tolist() == [1, 3, 7]
