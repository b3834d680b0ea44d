"""Products of rows, and of rows and factors."""

from __future__ import annotations

import pytest
import torch

from kernels.pointwise import product
from kernels.pointwise.product import naive, with_llvm, with_torch

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, product], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 53])
def test_thirds_of_a_projection(ops, d):
    """As a layer hands them over; what lies beside them is never touched."""
    joined = torch.full((2, 3, 3 * d + 4), torch.nan)
    a, _, b = joined[..., 2 : 3 * d + 2].chunk(3, -1)
    a.normal_(), b.normal_()
    y = ops.multiply(a, b)
    assert y.is_contiguous()
    assert torch.equal(y.double(), (a.double() * b.double()).float().double())


@IMPLEMENTATIONS
def test_factors_of_every_row(ops):
    x, factors = torch.randn(4, 2, 5).transpose(0, 1), torch.randn(10)[::2]
    assert torch.equal(ops.multiply(x, factors), factors * x)


@pytest.mark.parametrize("ops", [naive, with_torch, product], ids=["naive", "torch", "op"])
def test_gradients(ops):
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind(0)
    inputs = [part.clone().requires_grad_() for part in (x, y[0])]
    assert torch.autograd.gradcheck(ops.multiply, inputs)
