"""Products of every head with its own matrix: against the law, any strides, bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.linear import head_linear as op
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize(
    "run",
    [
        op.head_linear,
        with_torch.head_linear,
        partial(with_torch.head_linear, invariant=True),
        with_llvm.head_linear,
    ],
    ids=["op", "torch", "invariant", "llvm"],
)


@FAST
@pytest.mark.parametrize("n_tokens", [1, 3, 8])
@pytest.mark.parametrize(("n", "m"), [(16, 32), (5, 3), (12, 40), (128, 70), (1, 1)])
def test_equals_the_law(run, n_tokens, n, m):
    """Columns of a wider projection, as a layer hands them over."""
    x = torch.full((2, n_tokens, 3, n + 5), torch.nan)[..., 2 : n + 2].normal_()
    weight = torch.randn(3, n, m)
    y = run(x, weight)
    assert y.shape == (2, n_tokens, 3, m)
    assert nmse(y, naive.head_linear(x.double(), weight.double())) < 1e-12


def test_the_law_by_hand():
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    weight = torch.tensor([[[1.0, 0.0], [0.0, 10.0]], [[0.0, 5.0], [1.0, 0.0]]])
    assert naive.head_linear(x, weight).flatten().tolist() == [1.0, 20.0, 4.0, 15.0]


@pytest.mark.parametrize(
    "run",
    [partial(with_torch.head_linear, invariant=True), with_llvm.head_linear],
    ids=["torch", "llvm"],
)
def test_bits_do_not_depend_on_neighbours(run):
    x, weight = torch.randn(2, 9, 4, 20), torch.randn(4, 20, 24)
    y = run(x, weight)
    for start, stop in ((0, 1), (3, 5), (2, 9)):
        assert torch.equal(run(x[1:, start:stop], weight), y[1:, start:stop])
