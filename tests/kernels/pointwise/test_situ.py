"""SiTU: against numpy, its ends, strides, bits, gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.pointwise import situ as op
from kernels.pointwise.situ import naive, with_llvm, with_torch

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, op], ids=["naive", "torch", "llvm", "op"]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("linear", [25.0, 0.0], ids=["both", "gate"])
@pytest.mark.parametrize("d", [1, 16, 53])
def test_halves_of_one_tensor(ops, d, linear):
    gate, up = (torch.randn(2, 3, 2 * d) * 8).split(d, -1)
    g, u = (x.double().numpy() for x in (gate, up))
    if linear:
        u = linear * np.tanh(u / linear)
    wanted = torch.from_numpy(4 * np.tanh(g / 4) / (1 + np.exp(-g)) * u)
    y = ops.situ(gate, up, 4.0, linear)
    torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=1e-6)


@IMPLEMENTATIONS
def test_far_away(ops):
    gate, up = torch.tensor([[1e4, 1e4, -1e4]]), torch.tensor([[1e4, -1e4, 1e4]])
    torch.testing.assert_close(ops.situ(gate, up, 4.0, 25.0), torch.tensor([[100.0, -100.0, 0.0]]))


@pytest.mark.parametrize("run", [op.situ, with_torch.situ])
def test_bits_do_not_depend_on_neighbours(run):
    gate, up = torch.randn(2, 9, 21)
    y = run(gate, up, 4.0, 25.0, invariant=True)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(run(gate[one], up[one], 4.0, 25.0, invariant=True), y[one])


@pytest.mark.parametrize("ops", [naive, with_torch, op], ids=["naive", "torch", "op"])
def test_gradients(ops):
    gate, up = torch.randn(2, 3, 4, dtype=torch.float64).unbind(0)
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: ops.situ(*x, 4.0, 25.0), leaves)
