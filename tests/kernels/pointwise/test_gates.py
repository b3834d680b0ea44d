"""The gates of recurrences: by hand, their ends, strides, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.pointwise import gates
from kernels.pointwise.gates import naive, with_llvm, with_torch

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, gates], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
def test_by_hand(ops):
    # softplus(ln 3) = ln 4, sigmoid(ln 3) = 3/4
    decay, dt = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([math.log(3.0), 0.0])
    g, beta = ops.delta_gates(decay, dt, torch.tensor([-1.0, -2.0]), decay)
    torch.testing.assert_close(g, math.log(4.0) * torch.tensor([[-1.0, -2.0]]))
    torch.testing.assert_close(beta, torch.tensor([[0.5, 0.75]]))


@IMPLEMENTATIONS
def test_far_away(ops):
    raw = torch.tensor([-1e4, -60.0, 60.0, 1e4])
    g, beta = ops.delta_gates(raw, torch.zeros(4), -torch.ones(4), raw)
    torch.testing.assert_close(g, torch.tensor([0.0, -math.exp(-60.0), -60.0, -1e4]))
    torch.testing.assert_close(beta, torch.tensor([0.0, math.exp(-60.0), 1.0, 1.0]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_heads", [1, 16, 21, 48])
def test_columns_of_a_projection(ops, n_heads):
    """As a layer hands them over; what lies beside them is never touched."""
    joined = torch.full((2, 3, 2 * n_heads + 5), torch.nan)
    beta, decay = joined[..., 1 : 2 * n_heads + 1].normal_().split(n_heads, -1)
    dt, a = torch.randn(2, 2 * n_heads)[:, ::2]
    law = naive.delta_gates(decay.double(), dt.double(), a.double(), beta.double())
    for ours, exact in zip(ops.delta_gates(decay, dt, a, beta), law, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-7)


@IMPLEMENTATIONS
def test_steps_by_hand(ops):
    step, dt = torch.tensor([[0.0, math.log(3.0), 1e4]]), torch.tensor([math.log(3.0), 0.0, 0.0])
    size, g = ops.step_gates(step, dt, torch.tensor([-1.0, -2.0, -0.5]))
    torch.testing.assert_close(size, torch.tensor([[math.log(4.0), math.log(4.0), 1e4]]))
    torch.testing.assert_close(g, torch.tensor([[-math.log(4.0), -2 * math.log(4.0), -5e3]]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_heads", [1, 16, 21])
def test_steps_of_a_projection(ops, n_heads):
    step = torch.full((2, 3, n_heads + 5), torch.nan)[..., 1 : n_heads + 1].normal_()
    dt, a = torch.randn(2, 2 * n_heads)[:, ::2]
    law = naive.step_gates(step.double(), dt.double(), a.double())
    for ours, exact in zip(ops.step_gates(step, dt, a), law, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ops", [naive, with_torch, gates], ids=["naive", "torch", "op"])
def test_gradients(ops):
    decay, dt, a, beta = torch.randn(4, 2, 3, dtype=torch.float64).unbind(0)
    inputs = [x.clone().requires_grad_() for x in (decay, dt[0], a[0], beta)]
    assert torch.autograd.gradcheck(ops.delta_gates, inputs)
    assert torch.autograd.gradcheck(ops.step_gates, inputs[:3])


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 37])
def test_attentions_output_is_gated(ops, d):
    """By a gate for every number, or one for a row."""
    x, gate = torch.randn(2, 2, 3, d + 3)[..., 1 : d + 1].unbind(0)
    for opened in (gate, gate[..., :1]):
        exact = x.double() * torch.sigmoid(opened.double())
        torch.testing.assert_close(ops.output_gate(x, opened).double(), exact, rtol=1e-6, atol=1e-7)
