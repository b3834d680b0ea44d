"""Softmax-weighted sums of rows: by hand, against the law, strides, bits, gradients."""

from __future__ import annotations

import pytest
import torch

from kernels.norm import row_mixture as op
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, op], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
def test_by_hand(ops):
    """Scores 1 and -1 of rows that are as long as rows of ones: shares e and 1/e."""
    x, others = torch.tensor([[1.0, -1.0]]), torch.tensor([[[1.0, 1.0]]])
    e = torch.e**2 / (1 + torch.e**2)
    y = ops.mix_rows(x, others, torch.tensor([0.0, 1.0]), 0.0)
    torch.testing.assert_close(y, torch.tensor([[1.0, 2 * e - 1]]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("d", [1, 16, 70])
def test_equals_the_law(ops, d, n):
    joined = torch.full((2, 3, d + 5), torch.nan)
    x, weight = joined[..., 2 : 2 + d].normal_(), torch.randn(d)
    others = 3 * torch.randn(n, 2, 3, d)
    law = naive.mix_rows(x.double(), others.double(), weight.double(), 1e-5)
    y = ops.mix_rows(x, others, weight, 1e-5)
    assert y.shape == x.shape
    assert nmse(y, law) < 1e-12


@IMPLEMENTATIONS
def test_one_row_far_above_the_others_is_the_sum(ops):
    x, others = torch.full((1, 20), -1.0), torch.ones(2, 1, 20)
    others[0] = -1
    y = ops.mix_rows(x, others, torch.full((20,), 50.0), 0.0)
    assert torch.equal(y, others[1])


@pytest.mark.parametrize("run", [op.mix_rows, with_torch.mix_rows])
def test_bits_do_not_depend_on_neighbours(run):
    x, others, weight = torch.randn(9, 70), torch.randn(3, 9, 70), torch.randn(70)
    y = run(x, others, weight, 1e-5, invariant=True)
    for row in range(9):
        one = slice(row, row + 1)
        alone = run(x[one], others[:, one].contiguous(), weight, 1e-5, invariant=True)
        assert torch.equal(alone, y[one])


def test_more_rows_than_there_is_room_for():
    rows = torch.ones(op.MOST_ROWS, 1, 1)
    assert with_llvm.mix_rows(rows[0], rows, torch.ones(1), 0.0) == 1
    with pytest.raises(ValueError, match="more than 1024"):
        with_llvm.mix_rows(rows[0], torch.ones(op.MOST_ROWS + 1, 1, 1), torch.ones(1), 0.0)


@pytest.mark.parametrize("ops", [naive, with_torch, op], ids=["naive", "torch", "op"])
def test_gradients(ops):
    rows = torch.randn(4, 2, 3, dtype=torch.float64)
    leaves = [part.clone().requires_grad_() for part in (rows[0], rows[1:3], rows[3, 0])]
    assert torch.autograd.gradcheck(lambda *x: ops.mix_rows(*x, 1e-5), leaves)
