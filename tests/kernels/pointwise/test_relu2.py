"""Squared ReLU: values, its ends, strides, gradients."""

from __future__ import annotations

import pytest
import torch

from kernels.pointwise import relu2
from kernels.pointwise.relu2 import naive, with_llvm, with_torch

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, relu2], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
def test_by_hand(ops):
    x = torch.tensor([[-3.0, 0.0, 0.5, 1e20, -torch.inf]])
    wanted = torch.tensor([[0.0, 0.0, 0.25, torch.inf, 0.0]])
    torch.testing.assert_close(ops.relu2(x), wanted)


@IMPLEMENTATIONS
def test_no_number_stays_none(ops):
    assert ops.relu2(torch.tensor([[torch.nan, 1.0]])).isnan().tolist() == [[True, False]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 53])
def test_any_strides(ops, d):
    joined = torch.full((2, 3, d + 5), torch.nan)
    x = joined[..., 2 : 2 + d].normal_()
    assert torch.equal(ops.relu2(x), x.clamp(min=0) ** 2)
    x = torch.randn(d, 4).t()
    assert torch.equal(ops.relu2(x), x.clamp(min=0) ** 2)


@pytest.mark.parametrize("ops", [naive, with_torch, relu2], ids=["naive", "torch", "op"])
def test_gradients(ops):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.relu2, (x,))
