"""SwiGLU: by hand, its ends, strides, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.pointwise import swiglu
from kernels.pointwise.swiglu import naive, with_llvm, with_torch

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, swiglu], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
def test_by_hand(ops):
    # sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4
    gate = torch.tensor([[math.log(3.0), -math.log(3.0), 0.0]])
    y = ops.swiglu(gate, torch.tensor([[4.0, 8.0, 5.0]]))
    torch.testing.assert_close(y, math.log(3.0) * torch.tensor([[3.0, -2.0, 0.0]]))


@IMPLEMENTATIONS
def test_only_the_gate_is_gated(ops):
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
    nan = ops.swiglu(torch.tensor([[torch.nan, 1.0]]), torch.tensor([[1.0, torch.nan]]), 0.5)
    assert nan.isnan().all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 5, 16, 100])
def test_halves_of_one_tensor(ops, d):
    both = torch.randn(2, 3, 2 * d)
    before = both.clone()
    gate, up = both.split(d, -1)
    x = gate.double()
    torch.testing.assert_close(ops.swiglu(gate, up).double(), x / (1 + (-x).exp()) * up.double())
    assert torch.equal(both, before)


@IMPLEMENTATIONS
def test_any_strides(ops):
    gate, up = torch.randn(2, 7, 4, 5).transpose(1, 2).unbind(0)
    x = gate.double()
    y = ops.swiglu(gate, up.contiguous())
    torch.testing.assert_close(y.double(), x / (1 + (-x).exp()) * up.double())


@pytest.mark.parametrize("ops", [naive, with_torch, swiglu], ids=["naive", "torch", "op"])
def test_gradients(ops):
    gate, up = torch.randn(2, 2, 4, dtype=torch.float64).unbind(0)
    assert torch.autograd.gradcheck(
        ops.swiglu, (gate.clone().requires_grad_(), up.clone().requires_grad_())
    )
