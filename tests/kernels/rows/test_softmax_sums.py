"""The sums of a softmax against the law in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.rows import reductions as op
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "softmax_sums", [with_torch.softmax_sums, with_llvm.softmax_sums, op.softmax_sums]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 15, 64, 1000, 151_936])
def test_against_the_law(softmax_sums, d):
    x = 5 * torch.randn(3, d)
    largest = x.amax(1)
    expected = naive.softmax_sums(x, largest)
    torch.testing.assert_close(softmax_sums(x, largest), expected, rtol=1e-5, atol=1e-6)


@IMPLEMENTATIONS
def test_numbers_without_a_chance_add_nothing(softmax_sums):
    x = torch.tensor([[2.0, -torch.inf, 2.0, -3e38, -120.0]])
    assert softmax_sums(x, x.amax(1)).tolist() == [[2.0, 0.0]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("place", [0, 17, 70])
def test_a_number_that_is_none_spoils_its_own_row_alone(softmax_sums, place):
    x = torch.randn(3, 71)
    expected = softmax_sums(x, x.amax(1))
    x[1, place] = torch.nan
    found = softmax_sums(x, x.amax(1))
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


def test_rows_keep_their_bits_beside_others():
    x = torch.randn(40, 3001)[:, :3000]
    largest = x.amax(1)
    together = with_llvm.softmax_sums(x, largest)
    alone = [with_llvm.softmax_sums(x[i : i + 1], largest[i : i + 1]) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))
