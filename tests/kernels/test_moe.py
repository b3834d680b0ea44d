"""Router and experts."""

from __future__ import annotations

import pytest
import torch

from kernels import moe
from kernels.moe import naive, with_torch
from tests.support.closeness import nmse

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, moe], ids=["naive", "torch", "op"]
)
F32 = 1e-12


def make(n_rows=5, n_experts=6, n_used=2, d=8, f=12):
    weights, ids = naive.route(torch.randn(n_rows, n_experts), n_used)
    gate, up = torch.randn(2, n_experts, f, d)
    return torch.randn(n_rows, d), weights, ids, gate, up, torch.randn(n_experts, d, f)


@IMPLEMENTATIONS
def test_route_by_hand(ops):
    logits = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, 3.0, 1.0, 2.0]]).log()
    weights, ids = ops.route(logits, 2)
    assert ids.tolist() == [[3, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [4 / 7, 3 / 7]]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_used", [1, 3, 16])
def test_route_renormalises_the_largest_probabilities(ops, n_used):
    logits = torch.randn(9, 16) * 4
    weights, ids = ops.route(logits, n_used)
    assert weights.shape == ids.shape == (9, n_used)
    p = logits.double().softmax(-1)
    largest = p.sort(-1, descending=True).values[:, :n_used]
    torch.testing.assert_close(p.gather(1, ids), largest)
    assert nmse(weights, largest / largest.sum(-1, keepdim=True)) < F32


@IMPLEMENTATIONS
def test_a_vanishing_sum_is_not_blown_up(ops):
    n_experts = 20000
    logits = torch.zeros(1, n_experts)
    logits[0, 7] = 1e-3
    weights, ids = ops.route(logits, 1)
    assert ids.item() == 7
    assert weights.item() == pytest.approx(1.001 / n_experts * 2**14, rel=1e-3)


@IMPLEMENTATIONS
def test_route_survives_extreme_logits(ops):
    weights, ids = ops.route(torch.tensor([[9999.0, -1e4, 1e4, 0.0]]), 2)
    assert ids.tolist() == [[2, 0]]
    odds = torch.tensor([[1.0, -1.0]]).sigmoid()
    torch.testing.assert_close(weights, odds)


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_rows", [1, 2, 33])
@pytest.mark.parametrize("n_used", [1, 2, 6])
def test_experts_equal_the_dense_sum(ops, n_rows, n_used):
    x, weights, ids, gate, up, down = make(n_rows, n_used=n_used)
    y = ops.experts(x, weights, ids, gate, up, down)
    every = torch.zeros(n_rows, 6).scatter(1, ids, weights).double()
    opened = torch.einsum("nd,efd->nef", x.double(), gate.double())
    hidden = torch.nn.functional.silu(opened) * torch.einsum("nd,efd->nef", x.double(), up.double())
    truth = torch.einsum("ne,nef,edf->nd", every, hidden, down.double())
    assert nmse(y, truth) < F32


@IMPLEMENTATIONS
def test_experts_nobody_chose_are_not_read(ops):
    x, weights, ids, gate, up, down = make(n_experts=8)
    ids = ids % 3
    expected = ops.experts(x, weights, ids, gate, up, down)
    gate[3:] = up[3:] = down[3:] = torch.nan
    assert torch.equal(ops.experts(x, weights, ids, gate, up, down), expected)


def test_a_row_does_not_depend_on_its_neighbours():
    x, weights, ids, *matrices = make(n_rows=9)
    together = with_torch.experts(x, weights, ids, *matrices)
    backwards = with_torch.experts(x.flip(0), weights.flip(0), ids.flip(0), *matrices).flip(0)
    assert nmse(backwards, together) < F32
    for i in range(9):
        alone = with_torch.experts(x[i : i + 1], weights[i : i + 1], ids[i : i + 1], *matrices)
        assert nmse(alone, together[i : i + 1]) < F32
