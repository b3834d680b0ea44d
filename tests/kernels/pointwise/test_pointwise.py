"""Operations on one number after another: by hand, their ends, strides, bits, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import pointwise
from kernels.pointwise import naive, with_llvm
from kernels.pointwise.with_torch import fused as with_torch
from kernels.pointwise.with_torch import invariant

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, pointwise], ids=["naive", "torch", "llvm", "op"]
)
DIFFERENTIABLE = pytest.mark.parametrize(
    "ops", [naive, with_torch, pointwise], ids=["naive", "torch", "op"]
)


@DIFFERENTIABLE
def test_gradients(ops):
    x, y, z = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True).unbind(0)
    a, b = torch.randn(2, 4, dtype=torch.float64, requires_grad=True).unbind(0)
    for run, inputs in (
        (ops.add, (x, a)),
        (ops.multiply, (x, a)),
        (ops.relu2, (x,)),
        (ops.swiglu, (x, y)),
        (lambda *both: ops.clamped_swiglu(*both, 0.5), (x, y)),
        (lambda *both: ops.situ(*both, 4.0, 25.0), (x, y)),
        (ops.geglu, (x, y)),
        (ops.output_gate, (x, y)),
        (ops.delta_gates, (x, a, b, z)),
        (ops.step_gates, (x, a, b)),
        (lambda low: ops.open_low(low, 2.0), (x,)),
    ):
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        assert torch.autograd.gradcheck(run, leaves)


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 33])
def test_sums_round_once(ops, d):
    x, y = torch.randn(2, 2, 3, 2 * d)[..., ::2].unbind(0)
    assert torch.equal(ops.add(x, y), x + y)
    assert torch.equal(ops.add(x, y[0, 0]), x + y[0, 0])


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 53])
def test_products_of_thirds_of_a_projection(ops, d):
    """As a layer hands them over; what lies next to them is never touched."""
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


@IMPLEMENTATIONS
def test_relu2_by_hand(ops):
    x = torch.tensor([[-3.0, 0.0, 0.5, 1e20, -torch.inf]])
    wanted = torch.tensor([[0.0, 0.0, 0.25, torch.inf, 0.0]])
    torch.testing.assert_close(ops.relu2(x), wanted)


@IMPLEMENTATIONS
def test_relu2_of_nan(ops):
    assert ops.relu2(torch.tensor([[torch.nan, 1.0]])).isnan().tolist() == [[True, False]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 53])
def test_relu2_of_any_strides(ops, d):
    joined = torch.full((2, 3, d + 5), torch.nan)
    x = joined[..., 2 : 2 + d].normal_()
    assert torch.equal(ops.relu2(x), x.clamp(min=0) ** 2)
    x = torch.randn(d, 4).t()
    assert torch.equal(ops.relu2(x), x.clamp(min=0) ** 2)


@IMPLEMENTATIONS
def test_swiglu_by_hand(ops):
    # sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4
    gate = torch.tensor([[math.log(3.0), -math.log(3.0), 0.0]])
    y = ops.swiglu(gate, torch.tensor([[4.0, 8.0, 5.0]]))
    torch.testing.assert_close(y, math.log(3.0) * torch.tensor([[3.0, -2.0, 0.0]]))


@IMPLEMENTATIONS
def test_swiglu_gates_its_gate(ops):
    gate, up = torch.tensor([0.0, 1e4, -1e4]), torch.tensor([3.0, 2.0, 7.0])
    torch.testing.assert_close(ops.swiglu(gate, up), torch.tensor([0.0, 2e4, 0.0]))
    assert not torch.equal(ops.swiglu(up, gate), ops.swiglu(gate, up))


@IMPLEMENTATIONS
def test_a_limit_cuts_both_factors_off(ops):
    ln3 = math.log(3.0)
    # silu(ln 3) = 3/4 ln 3 = 0.82, silu(-ln 3) = -1/4 ln 3; 100 passes the gate as it is
    gate = torch.tensor([[ln3, ln3, -ln3, 100.0, 100.0]])
    up = torch.tensor([[0.25, -3.0, 3.0, 0.25, 3.0]])
    wanted = torch.tensor([[0.125, -0.25, -ln3 / 8, 0.125, 0.25]])
    torch.testing.assert_close(ops.swiglu(gate, up, 0.5), wanted)


@IMPLEMENTATIONS
def test_a_limit_in_front_of_silu(ops):
    ln3 = math.log(3.0)
    # the gate is cut off at ln 3, where silu is 3/4 ln 3; below it passes, however small
    gate = torch.tensor([[ln3, 100.0, -ln3, -2 * ln3, 5.0]])
    up = torch.tensor([[0.5, 1.0, -9.0, 9.0, torch.nan]])
    wanted = torch.tensor([[0.375, 0.75, ln3 / 4, -ln3 / 5, torch.nan]]) * ln3
    torch.testing.assert_close(ops.clamped_swiglu(gate, up, ln3), wanted, equal_nan=True)
    nan = ops.swiglu(torch.tensor([[torch.nan, 1.0]]), torch.tensor([[1.0, torch.nan]]), 0.5)
    assert nan.isnan().all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 5, 16, 100])
def test_swiglu_of_halves_of_one_tensor(ops, d):
    both = torch.randn(2, 3, 2 * d)
    before = both.clone()
    gate, up = both.split(d, -1)
    x = gate.double()
    torch.testing.assert_close(ops.swiglu(gate, up).double(), x / (1 + (-x).exp()) * up.double())
    assert torch.equal(both, before)


@IMPLEMENTATIONS
def test_swiglu_of_any_strides(ops):
    gate, up = torch.randn(2, 7, 4, 5).transpose(1, 2).unbind(0)
    x = gate.double()
    y = ops.swiglu(gate, up.contiguous())
    torch.testing.assert_close(y.double(), x / (1 + (-x).exp()) * up.double())


@IMPLEMENTATIONS
@pytest.mark.parametrize("linear", [25.0, 0.0], ids=["both", "gate"])
@pytest.mark.parametrize("d", [1, 16, 53])
def test_situ_of_halves_of_one_tensor(ops, d, linear):
    gate, up = (torch.randn(2, 3, 2 * d) * 8).split(d, -1)
    g, u = (x.double().numpy() for x in (gate, up))
    if linear:
        u = linear * np.tanh(u / linear)
    wanted = torch.from_numpy(4 * np.tanh(g / 4) / (1 + np.exp(-g)) * u)
    y = ops.situ(gate, up, 4.0, linear)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=1e-6)


@IMPLEMENTATIONS
def test_situ_far_away(ops):
    gate, up = torch.tensor([[1e4, 1e4, -1e4]]), torch.tensor([[1e4, -1e4, 1e4]])
    torch.testing.assert_close(ops.situ(gate, up, 4.0, 25.0), torch.tensor([[100.0, -100.0, 0.0]]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 53])
def test_geglu_of_halves_of_one_tensor(ops, d):
    gate, up = (torch.randn(2, 3, 2 * d) * 3).split(d, -1)
    wanted = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    torch.testing.assert_close(ops.geglu(gate, up).double(), wanted, rtol=2e-6, atol=1e-6)


@IMPLEMENTATIONS
def test_geglu_far_away(ops):
    gate, up = torch.tensor([[1e9, -1e9, 0.0, -30.0]]), torch.full((1, 4), 2.0)
    torch.testing.assert_close(ops.geglu(gate, up), torch.tensor([[2e9, 0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("run", [with_llvm.geglu, invariant.geglu])
def test_bits_of_geglu_do_not_depend_on_neighbours(run):
    gate, up = torch.randn(2, 9, 21)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(run(gate[one], up[one]), run(gate, up)[one])


@pytest.mark.parametrize("run", [with_llvm.situ, invariant.situ])
def test_bits_of_situ_do_not_depend_on_neighbours(run):
    gate, up = torch.randn(2, 9, 21)
    y = run(gate, up, 4.0, 25.0)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(run(gate[one], up[one], 4.0, 25.0), y[one])


@IMPLEMENTATIONS
def test_delta_gates_by_hand(ops):
    # softplus(ln 3) = ln 4, sigmoid(ln 3) = 3/4
    decay, dt = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([math.log(3.0), 0.0])
    g, beta = ops.delta_gates(decay, dt, torch.tensor([-1.0, -2.0]), decay)
    torch.testing.assert_close(g, math.log(4.0) * torch.tensor([[-1.0, -2.0]]))
    torch.testing.assert_close(beta, torch.tensor([[0.5, 0.75]]))


@IMPLEMENTATIONS
def test_delta_gates_far_away(ops):
    raw = torch.tensor([-1e4, -60.0, 60.0, 1e4])
    g, beta = ops.delta_gates(raw, torch.zeros(4), -torch.ones(4), raw)
    torch.testing.assert_close(g, torch.tensor([0.0, -math.exp(-60.0), -60.0, -1e4]))
    torch.testing.assert_close(beta, torch.tensor([0.0, math.exp(-60.0), 1.0, 1.0]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_heads", [1, 16, 21, 48])
def test_delta_gates_of_columns_of_a_projection(ops, n_heads):
    """As a layer hands them over; what lies next to them is never touched."""
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


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 37])
def test_attentions_output_is_gated(ops, d):
    """By a gate for every number, or one for a row."""
    x, gate = torch.randn(2, 2, 3, d + 3)[..., 1 : d + 1].unbind(0)
    for opened in (gate, gate[..., :1]):
        exact = x.double() * torch.sigmoid(opened.double())
        torch.testing.assert_close(ops.output_gate(x, opened).double(), exact, rtol=1e-6, atol=1e-7)


@IMPLEMENTATIONS
@pytest.mark.parametrize("rank", [1, 16, 53])
def test_gates_of_streams(ops, rank):
    low = torch.full((2, 3, rank + 5), torch.nan)[..., 1 : rank + 1].normal_(0, 4)
    exact = low.double() / 3
    opened = ops.open_low(low, 3.0)
    torch.testing.assert_close(opened.double(), exact * torch.sigmoid(exact), rtol=1e-6, atol=1e-7)
    half = torch.tensor([[1.0]]) / (1 + torch.exp(torch.tensor(-1.0)))
    torch.testing.assert_close(ops.open_low(torch.tensor([[2.0]]), 2.0), half)


def test_bits_of_gates_of_streams_do_not_depend_on_neighbours():
    low = torch.randn(6, 31)[:, 3:24]
    opened = pointwise.open_low(low, 3, invariant=True)
    for row in range(6):
        assert torch.equal(
            pointwise.open_low(low[row : row + 1], 3, invariant=True), opened[row : row + 1]
        )
