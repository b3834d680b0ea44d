"""RMS norm, l2 norm and the gated norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import norm
from kernels.linear import rounding
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(norm, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, norm], ids=["naive", "torch", "llvm", "op"]
)
SHAPES = pytest.mark.parametrize("shape", [(5,), (1, 64), (2, 3, 4, 128), (1, 7, 1000), (2, 1)])
F32 = 1e-12


def rows(shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray]:
    x = torch.randn(shape) * 3 + 1
    return x, x.double().numpy()


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(ops, shape, eps):
    x, exact = rows(shape)
    weight = torch.randn(shape[-1])
    truth = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + eps) * weight.double().numpy()
    assert nmse(ops.rms_norm(x, weight, eps), torch.from_numpy(truth)) < F32


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_layer_norm(ops, shape, eps):
    x, exact = rows(shape)
    weight = torch.randn(shape[-1])
    centred = exact - exact.mean(-1, keepdims=True)
    truth = centred / np.sqrt(np.var(exact, -1, keepdims=True) + eps) * weight.double().numpy()
    result = ops.layer_norm(x, weight, eps)
    if shape[-1] == 1:
        assert torch.equal(result, torch.zeros(shape))
    else:
        assert nmse(result, torch.from_numpy(truth)) < F32


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2_norm(ops, shape, eps):
    x, exact = rows(shape)
    truth = exact / np.sqrt(np.sum(exact**2, -1, keepdims=True) + eps)
    assert nmse(ops.l2_norm(x, eps), torch.from_numpy(truth)) < F32


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_heads", [1, 3])
def test_head_norm(ops, n_heads):
    x, exact = rows((2, 5, n_heads, 24))
    weight = torch.randn(n_heads, 24)
    truth = exact / np.sqrt(np.sum(exact**2, -1, keepdims=True) + 1e-6) * weight.double().numpy()
    assert nmse(ops.head_norm(x, weight, 1e-6), torch.from_numpy(truth)) < F32


MAX_NORMS = pytest.mark.parametrize(
    "ops",
    [*implementations(rounding, "naive", "with_torch", "with_llvm"), rounding],
    ids=["naive", "torch", "llvm", "op"],
)


@MAX_NORMS
@SHAPES
def test_max_norm(ops, shape):
    x, _ = rows(shape)
    normed, largest = ops.max_norm(x)
    assert torch.equal(largest, x.abs().amax(-1, keepdim=True))
    assert torch.equal(normed, x / largest)


@MAX_NORMS
def test_max_norm_of_zeros_and_of_the_smallest_numbers(ops):
    x = torch.zeros(2, 70)[:, ::2]
    x[1, 3] = -1e-39
    normed, largest = ops.max_norm(x)
    assert largest.flatten().tolist() == [torch.finfo(torch.float32).tiny] * 2
    assert torch.equal(normed, x / largest)


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("sigmoid", [False, True], ids=["silu", "sigmoid"])
def test_the_gate_comes_after_the_norm(ops, shape, sigmoid):
    x, exact = rows(shape)
    gate, weight = torch.randn(shape), torch.randn(shape[-1])
    scale = weight.double().numpy() / np.sqrt(np.mean(exact**2, -1, keepdims=True) + 1e-6)
    z = gate.double().numpy()
    truth = exact * scale * ((1 if sigmoid else z) / (1 + np.exp(-z)))
    y = ops.gated_rms_norm(x, gate, weight, 1e-6, sigmoid=sigmoid)
    assert nmse(y, torch.from_numpy(truth)) < F32


@IMPLEMENTATIONS
@pytest.mark.parametrize(("n_groups", "d"), [(1, 5), (2, 16), (3, 21), (8, 256)])
def test_the_gate_comes_before_the_norm_of_its_group(ops, n_groups, d):
    """As columns of a projection, too; what lies next to them is never touched."""
    joined = torch.full((2, 3, 2 * n_groups * d + 3), torch.nan)
    gate = joined[..., 1 : n_groups * d + 1].normal_().view(2, 3, n_groups, d)
    x = torch.randn(2, 3, n_groups, d)
    weight = torch.randn(n_groups, d)
    z, w = gate.double().numpy(), weight.double().numpy()
    opened = x.double().numpy() * z / (1 + np.exp(-z))
    truth = opened / np.sqrt(np.mean(opened**2, -1, keepdims=True) + 1e-6) * w
    assert nmse(ops.group_rms_norm(x, gate, weight, 1e-6), torch.from_numpy(truth)) < F32


@IMPLEMENTATIONS
def test_zeros_stay_zero_and_tiny_rows_meet_eps(ops):
    x = torch.tensor([[0.0, 0.0], [3e-4, 4e-4]])
    ones = torch.ones(2)
    assert torch.equal(ops.l2_norm(x, 1e-6)[0], torch.zeros(2))
    assert torch.equal(ops.rms_norm(x, ones, 1e-6)[0], torch.zeros(2))
    # the length is 5e-4, so the sum of squares is a quarter of eps
    assert ops.l2_norm(x, 1e-6)[1, 0].item() == pytest.approx(3e-4 / math.sqrt(1.25e-6))
    assert ops.rms_norm(x, ones, 1e-6)[1, 0].item() == pytest.approx(3e-4 / math.sqrt(1.125e-6))


@IMPLEMENTATIONS
def test_any_strides(ops):
    x = torch.randn(2, 16, 5).transpose(1, 2)
    plain, weight = x.contiguous(), torch.randn(32)[::2]
    assert nmse(ops.rms_norm(x, weight, 1e-6), naive.rms_norm(plain, weight, 1e-6)) < F32
    assert nmse(ops.l2_norm(x, 1e-6), naive.l2_norm(plain, 1e-6)) < F32


@IMPLEMENTATIONS
@pytest.mark.parametrize("d", [1, 16, 21, 130])
def test_heads_of_a_projection(ops, d):
    """As a layer hands them over; what lies next to them is never touched."""
    joined = torch.full((2, 3, 8 * d + 5), torch.nan)
    x = joined[..., 1 : 4 * d + 1].normal_().view(2, 3, 4, d)
    gate = joined[..., 4 * d + 1 : 8 * d + 1].normal_().view(2, 3, 4, d)
    weight = torch.randn(d)
    y, z, w = x.double(), gate.double(), weight.double()
    assert nmse(ops.rms_norm(x, weight, 1e-6), naive.rms_norm(y, w, 1e-6)) < F32
    assert nmse(ops.l2_norm(x, 1e-6), naive.l2_norm(y, 1e-6)) < F32
    for given in (x, x.contiguous()):
        gated = ops.gated_rms_norm(given, gate, weight, 1e-6)
        assert nmse(gated, naive.gated_rms_norm(y, z, w, 1e-6)) < F32


def test_gradients_are_those_of_the_law():
    x, gate, weight = (torch.randn(s).double().requires_grad_() for s in ((3, 8), (3, 8), (8,)))
    seen = torch.randn(3, 8).double()

    def gradients(ops) -> tuple[torch.Tensor, ...]:
        y = ops.gated_rms_norm(ops.l2_norm(x, 1e-2), gate, weight, 1e-2)
        return torch.autograd.grad((y * seen).sum(), (x, gate, weight))

    for ours, law in zip(gradients(with_torch), gradients(naive), strict=True):
        assert nmse(ours, law) < 1e-26
