"""Mixed streams: against the formulas, a matrix that is doubly stochastic, strides, bits,
gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rows import streams as op
from kernels.rows.streams import N_GATES, N_STREAMS
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize("ops", [with_torch, with_llvm, op], ids=["torch", "llvm", "op"])
ALL = pytest.mark.parametrize("ops", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
ROUNDS = 20, 1e-6


def inputs(d: int):
    """Products as columns of a projection; everything but streams has strides of its own."""
    joined = torch.full((2, 3, N_GATES + 3), torch.nan)
    m = joined[..., 2 : N_GATES + 2].normal_().mul_(2)
    x, y = torch.randn(2, 3, N_STREAMS, d), torch.randn(2, 3, d + 1)[..., 1:]
    return m, torch.randn(3), torch.randn(N_GATES), x, y


def in_numpy(m: np.ndarray, scale: np.ndarray, base: np.ndarray, n_rounds: int) -> np.ndarray:
    """One token's matrix, written from the specification: rows are sources."""
    c = (m[8:] * scale[2] + base[8:]).reshape(4, 4)
    c = np.exp(c) / np.exp(c).sum(1, keepdims=True) + 1e-6
    c = c / (c.sum(0) + 1e-6)
    for _ in range(n_rounds - 1):
        c = c / (c.sum(1, keepdims=True) + 1e-6)
        c = c / (c.sum(0) + 1e-6)
    return c


@ALL
@pytest.mark.parametrize("n_rounds", [1, 2, 20])
def test_gates_by_hand(ops, n_rounds):
    m, scale, base, *_ = inputs(1)
    gates = ops.stream_gates(m, scale, base, n_rounds, 1e-6).numpy()
    m, scale, base = (each.double().numpy() for each in (m, scale, base))
    read = 1 / (1 + np.exp(-(m[..., :4] * scale[0] + base[:4]))) + 1e-6
    gain = 2 / (1 + np.exp(-(m[..., 4:8] * scale[1] + base[4:8])))
    np.testing.assert_allclose(gates[..., :4], read, rtol=1e-5)
    np.testing.assert_allclose(gates[..., 4:8], gain, rtol=1e-5)
    for token in np.ndindex(2, 3):
        matrix = gates[token][8:].reshape(4, 4)
        np.testing.assert_allclose(matrix, in_numpy(m[token], scale, base, n_rounds), rtol=2e-5)
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-4)


@FAST
@pytest.mark.parametrize("d", [1, 16, 53])
def test_equals_the_formulas(ops, d):
    m, scale, base, x, y = inputs(d)
    gates = naive.stream_gates(m.double(), scale.double(), base.double(), *ROUNDS)
    for ours, wanted in (
        (ops.stream_gates(m, scale, base, *ROUNDS), gates),
        (ops.stream_gates(m[..., :4], scale[:1], base[:4], *ROUNDS), gates[..., :4]),
        (ops.weigh_streams(x, gates.float()), naive.weigh_streams(x.double(), gates)),
        (
            ops.advance_streams(x, y, gates.float()),
            naive.advance_streams(x.double(), y.double(), gates),
        ),
    ):
        assert ours.shape == wanted.shape
        assert nmse(ours, wanted) < 1e-12


@ALL
def test_streams_go_from_rows_to_columns(ops):
    """A matrix that sends every stream to the next one; the row goes to the third alone."""
    matrix = torch.eye(4).roll(1, 1)
    gates = torch.cat((torch.ones(4), torch.tensor([0.0, 0, 5, 0]), matrix.flatten()))
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    moved = ops.advance_streams(x[None], torch.tensor([[10.0]]), gates[None])
    assert moved.flatten().tolist() == [4.0, 1.0, 52.0, 3.0]
    assert ops.weigh_streams(x[None], gates[None, :4]).tolist() == [[10.0]]


@pytest.mark.parametrize("ops", [op, with_torch], ids=["op", "torch"])
def test_bits_do_not_depend_on_neighbours(ops):
    m, scale, base, x, y = inputs(21)
    m, x, y = (each.flatten(0, 1) for each in (m, x, y))
    gates = ops.stream_gates(m, scale, base, *ROUNDS, invariant=True)
    whole = ops.weigh_streams(x, gates), ops.advance_streams(x, y, gates)
    for row in range(6):
        one = slice(row, row + 1)
        of_one = ops.stream_gates(m[one], scale, base, *ROUNDS, invariant=True)
        assert torch.equal(of_one, gates[one])
        alone = ops.weigh_streams(x[one], of_one), ops.advance_streams(x[one], y[one], of_one)
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("ops", [naive, with_torch, op], ids=["naive", "torch", "op"])
def test_gradients(ops):
    m, scale, base, x, y = (each.double().requires_grad_() for each in inputs(2))
    few = 3, 1e-6
    check = torch.autograd.gradcheck
    assert check(lambda *each: ops.stream_gates(*each, *few), (m[:1, :1], scale, base))
    gates = naive.stream_gates(m, scale, base, *few).detach().requires_grad_()
    assert check(ops.weigh_streams, (x, gates))
    assert check(ops.advance_streams, (x, y, gates))
