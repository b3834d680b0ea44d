"""Rotary position embedding, against rotations in the complex plane."""

from __future__ import annotations

import cmath
import math
from types import SimpleNamespace

import pytest
import torch

from kernels import rope
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(rope, "naive", "with_llvm", "with_torch")

LLVM = SimpleNamespace(
    rope_table=with_torch.rope_table,
    apply_rope=with_llvm.apply_rope,
    rope_at_end=with_llvm.rope_at_end,
)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, LLVM, rope], ids=["naive", "torch", "llvm", "op"]
)
F32 = 1e-12


def frequencies(n_rot: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_rot", [2, 6, 8])
def test_pairs_turn_by_their_angle(ops, n_rot):
    positions = torch.tensor([[0, 1, 7], [5, 2, 900]])
    x = torch.randn(2, 3, 2, 8)
    cos, sin = ops.rope_table(positions, n_rot, frequencies(n_rot), 1.0)
    y = ops.apply_rope(x, cos, sin)
    half = n_rot // 2
    truth = x.double().clone()
    for b in range(2):
        for t in range(3):
            for h in range(2):
                for j in range(half):
                    angle = positions[b, t].item() * 10000.0 ** (-2 * j / n_rot)
                    pair = complex(x[b, t, h, j], x[b, t, h, j + half])
                    turned = pair * cmath.exp(1j * angle)
                    truth[b, t, h, j], truth[b, t, h, j + half] = turned.real, turned.imag
    assert nmse(y, truth) < F32
    assert torch.equal(y[..., n_rot:], x[..., n_rot:])


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_rot", [2, 8, 40, 64])
def test_neighbours_at_the_end_turn_by_their_angle_and_back(ops, n_rot):
    positions = torch.tensor([[0, 1, 7], [5, 2, 900]])
    x = torch.randn(2, 3, 2, 71)[..., :69]
    cos, sin = rope.rope_table(positions, n_rot, frequencies(n_rot), 1.0)
    y = ops.rope_at_end(x, cos, sin)
    turns = torch.polar(
        torch.ones(2, 3, n_rot // 2).double(), positions[..., None] * frequencies(n_rot)
    )
    pairs = torch.view_as_complex(x[..., -n_rot:].double().unflatten(-1, (-1, 2)).contiguous())
    truth = torch.view_as_real(pairs * turns.unsqueeze(2)).flatten(-2)
    assert nmse(y[..., -n_rot:], truth) < F32
    assert torch.equal(y[..., :-n_rot], x[..., :-n_rot])
    assert nmse(ops.rope_at_end(y, cos, sin, back=True), x.double()) < F32


@IMPLEMENTATIONS
def test_table_keeps_the_phase_of_far_positions_and_scales(ops):
    far = 1_000_003
    cos, sin = ops.rope_table(torch.tensor([[far]]), 8, frequencies(8), 1.25)
    assert cos.shape == sin.shape == (1, 1, 4)
    assert cos.dtype == sin.dtype == torch.float32
    for j in range(4):
        angle = far * 10000.0 ** (-j / 4)
        assert cos[0, 0, j].item() == pytest.approx(1.25 * math.cos(angle), abs=1e-7)
        assert sin[0, 0, j].item() == pytest.approx(1.25 * math.sin(angle), abs=1e-7)


@IMPLEMENTATIONS
def test_frequency_zero_turns_nothing(ops):
    inv_freq = torch.tensor([0.0, 1.0])
    cos, sin = ops.rope_table(torch.tensor([[3]]), 4, inv_freq, 1.0)
    x = torch.randn(1, 1, 1, 4)
    y = ops.apply_rope(x, cos, sin)
    assert torch.equal(y[..., [0, 2]], x[..., [0, 2]])
    assert not torch.isclose(y[..., [1, 3]], x[..., [1, 3]]).any()


@IMPLEMENTATIONS
def test_products_depend_on_the_distance_only(ops):
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at: int, of: int) -> float:
        turned = [
            ops.apply_rope(x, *ops.rope_table(torch.tensor([[p]]), 16, frequencies(16), 1.0))
            for x, p in ((q, at), (k, of))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


@IMPLEMENTATIONS
def test_any_strides(ops):
    cos, sin = ops.rope_table(torch.arange(5).unsqueeze(0), 6, frequencies(6), 1.0)
    x = torch.randn(1, 2, 5, 20)[..., ::2].transpose(1, 2)
    assert nmse(ops.apply_rope(x, cos, sin), naive.apply_rope(x.contiguous(), cos, sin)) < F32


@IMPLEMENTATIONS
@pytest.mark.parametrize(("n_rot", "head_dim"), [(2, 3), (6, 20), (64, 64), (32, 50)])
def test_heads_of_a_projection_and_halves_of_a_table(ops, n_rot, head_dim):
    """As a layer hands them over; what lies next to them is never touched."""
    joined = torch.full((2, 3, 4 * head_dim + 5), torch.nan)
    x = joined[..., 1 : 4 * head_dim + 1].normal_().view(2, 3, 4, head_dim)
    cos, sin = torch.randn(2, 3, n_rot).chunk(2, -1)
    y = ops.apply_rope(x, cos, sin)
    assert nmse(y, naive.apply_rope(x.double(), cos.double(), sin.double())) < F32
    assert torch.equal(y[..., n_rot:], x[..., n_rot:])


def test_gradients_are_those_of_the_law():
    cos, sin = (t.double() for t in with_torch.rope_table(torch.arange(3), 4, frequencies(4), 1.0))
    x = torch.randn(1, 3, 2, 6).double().requires_grad_()
    seen = torch.randn(1, 3, 2, 6).double()
    ours, law = (
        torch.autograd.grad((ops.apply_rope(x, cos[None], sin[None]) * seen).sum(), x)[0]
        for ops in (with_torch, naive)
    )
    assert nmse(ours, law) < 1e-26
