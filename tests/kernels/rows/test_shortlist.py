"""The candidates of a draft: the largest values of long rows."""

from __future__ import annotations

import pytest
import torch

from kernels.dispatch import uses_llvm
from kernels.rows import shortlist
from tests.support.implementations import implementations

naive, with_torch, with_llvm = implementations(shortlist, "naive", "with_torch", "with_llvm")

IMPLEMENTATIONS = [with_torch.shortlist]
if uses_llvm():
    IMPLEMENTATIONS.append(with_llvm.shortlist)


@pytest.mark.parametrize("shortlist", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 7), (127, 5), (128, 128), (129, 129), (4099, 256), (70_001, 40)]
)
def test_they_are_those_of_sorting(shortlist, n, k):
    random = torch.Generator().manual_seed(n)
    x = torch.randn(3, n, generator=random)
    x[1] = x[1].round()  # with equal ones
    x[2] = x[2].mul(0).add(2.0)  # all equal
    assert torch.equal(shortlist(x, k), naive.shortlist(x, k))


@pytest.mark.parametrize("shortlist", IMPLEMENTATIONS)
@pytest.mark.parametrize("wrong", [float("nan"), -float("inf"), float("inf")])
def test_they_stay_within_the_row(shortlist, wrong):
    x = torch.full((2, 300), wrong)
    x[1, ::7] = torch.randn(43)
    found = shortlist(x, 60)
    assert found.min() >= 0 and found.max() < 300
