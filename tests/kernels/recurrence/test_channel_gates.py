"""The gates of Kimi Delta Attention: by hand, their ends, strides, gradients, bits."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kernels.recurrence import channel_gates as op
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, op], ids=["naive", "torch", "llvm", "op"]
)
LN3 = math.log(3.0)


@IMPLEMENTATIONS
def test_by_hand(ops):
    # softplus(ln 3) = ln 4, sigmoid(ln 3) = 3/4
    decay, dt, a = torch.tensor([[0.0, LN3]]), torch.tensor([LN3, 0.0]), torch.tensor([-1.0, -2.0])
    beta = torch.tensor([[LN3]])
    g, written = ops.channel_gates(decay, dt, a, beta)
    torch.testing.assert_close(g, math.log(4.0) * torch.tensor([[-1.0, -2.0]]))
    torch.testing.assert_close(written, torch.tensor([[0.75]]))
    g, _ = ops.channel_gates(decay, dt, a, beta, -5.0)
    # sigmoid(ln 3) and sigmoid(2 ln 3)
    torch.testing.assert_close(g, -5 * torch.tensor([[0.75, 0.9]]))


@IMPLEMENTATIONS
def test_far_away(ops):
    raw = torch.tensor([-1e4, -60.0, 60.0, 1e4])
    g, _ = ops.channel_gates(raw, torch.zeros(4), -torch.ones(4), raw)
    torch.testing.assert_close(g, torch.tensor([0.0, -math.exp(-60.0), -60.0, -1e4]))
    g, _ = ops.channel_gates(raw, torch.zeros(4), -torch.ones(4), raw, -5.0)
    torch.testing.assert_close(g, torch.tensor([0.0, -5 * math.exp(-60.0), -5.0, -5.0]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("d", [1, 16, 21])
def test_columns_of_a_projection(ops, d, bound):
    """As a layer hands them over; what lies next to them is never touched."""
    joined = torch.full((2, 3, 4 * d + 7), torch.nan)
    decay, beta = joined[..., 1 : 4 * d + 5].normal_().split([4 * d, 4], -1)
    dt, a = torch.randn(4 * d), -torch.rand(2, 8 * d)[:, ::2][0]
    law = naive.channel_gates(decay.double(), dt.double(), a.double(), beta.double(), bound)
    for ours, exact in zip(ops.channel_gates(decay, dt, a, beta, bound), law, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(
    "run", [op.channel_gates, partial(with_torch.channel_gates, invariant=True)]
)
def test_bits_do_not_depend_on_neighbours(run, bound):
    decay, dt, a, beta = torch.randn(9, 21), torch.randn(21), -torch.rand(21), torch.randn(9, 3)
    options = {"invariant": True} if run is op.channel_gates else {}
    g, written = run(decay, dt, a, beta, bound, **options)
    for row in range(9):
        one = slice(row, row + 1)
        alone = run(decay[one], dt, a, beta[one], bound, **options)
        assert torch.equal(alone[0], g[one]) and torch.equal(alone[1], written[one])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("ops", [naive, with_torch, op], ids=["naive", "torch", "op"])
def test_gradients(ops, bound):
    decay, dt, a, beta = torch.randn(4, 2, 3, dtype=torch.float64).unbind(0)
    inputs = [x.clone().requires_grad_() for x in (decay, dt[0], a[0], beta)]
    assert torch.autograd.gradcheck(lambda *x: ops.channel_gates(*x, bound), inputs)
