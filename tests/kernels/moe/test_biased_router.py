"""The router with a bias, groups and scales, and experts without a gate."""

from __future__ import annotations

import pytest
import torch

from kernels import moe
from kernels.linear import integers
from kernels.moe import Choice, with_llvm
from kernels.moe.packed import RELU2
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_torch = implementations(moe, "naive", "with_torch")

ROUTES = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, moe], ids=["naive", "torch", "llvm", "op"]
)
F32 = 1e-12


def logit(*probabilities: float) -> torch.Tensor:
    p = torch.tensor([probabilities])
    return (p / (1 - p)).log()


@ROUTES
def test_the_bias_chooses_and_does_not_weigh(ops):
    logits, bias = logit(0.2, 0.5, 0.4, 0.1), torch.tensor([0.0, -1.0, 0.0, 0.25])
    weights, ids = ops.route(logits, bias, Choice(2, normalised=False))
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.1]]))
    weights, _ = ops.route(logits, bias, Choice(2, scale=2.5))
    torch.testing.assert_close(weights, 2.5 * torch.tensor([[0.8, 0.2]]))


@ROUTES
def test_only_the_best_groups_take_part(ops):
    # sums of two: 0.9, 1.0, 1.1; the best expert is in a group that is left out
    logits = logit(0.8, 0.05, 0.05, 0.5, 0.5, 0.05, 0.6, 0.5, 0.05)
    _, ids = ops.route(logits, None, Choice(3, n_groups=3, n_groups_used=2))
    assert ids.tolist() == [[6, 3, 4]]
    _, ids = ops.route(logits, None, Choice(3, n_groups=3, n_groups_used=3))
    assert ids.tolist() == [[0, 6, 3]]
    bias = torch.tensor([1.0] + [0.0] * 8)
    _, ids = ops.route(logits, bias, Choice(2, n_groups=3, n_groups_used=1))
    assert ids.tolist() == [[0, 1]]


@ROUTES
def test_of_equal_experts_and_groups_the_lower_comes_first(ops):
    logits = torch.zeros(2, 8)
    _, ids = ops.route(logits, None, Choice(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    _, ids = ops.route(logits, None, Choice(3, n_groups=4, n_groups_used=2))
    assert ids.tolist() == [[0, 1, 2]] * 2


@ROUTES
def test_experts_that_are_given_are_weighed(ops):
    logits = torch.tensor([[0.0, 2.0, -1.0, 30.0]])
    root = (1 + logits.double().exp()).log().sqrt()[0]
    weights = ops.route_given(logits, torch.tensor([[3, 2]]), Choice(2, "softplus", False, 1.5))
    assert nmse(weights[0], 1.5 * root[[3, 2]]) < F32
    weights = ops.route_given(logits, torch.tensor([[1, 0]]), Choice(2, "softplus"))
    assert nmse(weights[0], root[[1, 0]] / root[:2].sum()) < F32


@ROUTES
def test_nothing_is_divided_by_nothing(ops):
    weights, _ = ops.route(torch.full((1, 4), -1e4), None, Choice(2))
    assert torch.equal(weights, torch.zeros(1, 2))


@pytest.mark.parametrize("ops", [with_torch, with_llvm], ids=["torch", "llvm"])
@pytest.mark.parametrize("scores", ["sigmoid", "softmax", "softplus"])
@pytest.mark.parametrize(("n_experts", "n_groups"), [(16, 1), (16, 4), (42, 6), (5, 5), (300, 1)])
@pytest.mark.parametrize("normalised", [False, True])
def test_equals_the_law_and_rows_do_not_matter(ops, scores, n_experts, n_groups, normalised):
    logits, bias = torch.randn(9, n_experts + 2)[:, 1:-1] * 3, torch.randn(n_experts) * 0.2 - 2
    choice = Choice(3, scores, normalised, 2.0, n_groups, 3 if n_groups > 1 else 1)
    weights, ids = ops.route(logits, bias, choice)
    law_weights, law_ids = naive.route(logits.double(), bias.double(), choice)
    assert torch.equal(ids, law_ids)
    assert nmse(weights, law_weights) < F32
    assert torch.equal(ops.route_given(logits, ids, choice), weights)
    for width in (1, 2, 3, 8):
        some, chosen = ops.route(logits[9 - width :], bias, choice)
        assert torch.equal(some, weights[9 - width :])
        assert torch.equal(chosen, ids[9 - width :])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("mode", ["f32", "int8x2"])
def test_experts_without_a_gate(mode, invariant):
    x, up, down = torch.randn(7, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 24)
    weights, ids = moe.route(torch.randn(7, 5), None, Choice(2, "softmax"))
    packed = moe.pack_experts(None, up, down, mode, RELU2)
    y = moe.experts(x, weights, ids, packed, invariant=invariant)
    hidden = torch.einsum("nd,efd->nef", x.double(), up.double()).clamp(min=0).square()
    every = torch.zeros(7, 5).scatter(1, ids, weights).double()
    truth = torch.einsum("ne,nef,edf->nd", every, hidden, down.double())
    assert packed.shape == (5, 24, 16)
    assert nmse(y, truth) < (F32 if mode == "f32" else 1e-3)
    pairs = list(zip(up, down, strict=True))
    law = naive.pack(up, pairs, mode, RELU2, integers.weight_levels())
    # the fast versions hide the law's rounding here and there
    assert nmse(naive.experts(x, weights, ids, law), truth) < (F32 if mode == "f32" else 1e-3)


def test_unequal_numbers_of_matrices_without_a_gate_are_refused():
    with pytest.raises(ValueError, match="zip"):
        moe.pack_experts(None, torch.randn(3, 4, 4), torch.randn(2, 4, 4), "f32", RELU2)
