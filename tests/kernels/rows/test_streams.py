"""Residual streams: against the law, strides, bits, gradients."""

from __future__ import annotations

import pytest
import torch

from kernels.rows import streams as op
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(op, "naive", "with_llvm", "with_torch")

FAST = pytest.mark.parametrize("ops", [with_torch, with_llvm, op], ids=["torch", "llvm", "op"])


def inputs(d: int, n: int):
    """Gains are columns of a projection, as layers hand them over."""
    gain = torch.full((2, 3, n + 5), torch.nan)[..., 2 : n + 2].normal_(0, 4)
    x, gate = torch.randn(2, 2, 3, n, d)
    return x, 5 * gate, torch.randn(2, 3, d), gain


@FAST
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("d", [1, 16, 53])
def test_equals_the_law(ops, d, n):
    x, gate, y, gain = inputs(d, n)
    for name, given in (("mix_streams", (x, gate)), ("add_to_streams", (x, y, gain))):
        exact = [part.double() if isinstance(part, torch.Tensor) else part for part in given]
        ours, wanted = getattr(ops, name)(*given), getattr(naive, name)(*exact)
        assert ours.shape == wanted.shape
        assert nmse(ours, wanted) < 1e-12


@pytest.mark.parametrize("ops", [naive, with_torch, with_llvm], ids=["naive", "torch", "llvm"])
def test_by_hand(ops):
    x, zeros = torch.tensor([[[2.0], [6.0]]]), torch.zeros(1, 2)
    assert ops.mix_streams(x, zeros[..., None]).tolist() == [[2.0]]
    assert ops.add_to_streams(x, torch.tensor([[3.0]]), zeros).flatten().tolist() == [5.0, 9.0]


@pytest.mark.parametrize("ops", [op, with_torch], ids=["op", "torch"])
def test_bits_do_not_depend_on_neighbours(ops):
    x, gate, y, gain = (part.flatten(0, 1) for part in inputs(21, 3))
    whole = [
        ops.mix_streams(x, gate, invariant=True),
        ops.add_to_streams(x, y, gain, invariant=True),
    ]
    for row in range(6):
        one = slice(row, row + 1)
        alone = [
            ops.mix_streams(x[one], gate[one], invariant=True),
            ops.add_to_streams(x[one], y[one], gain[one], invariant=True),
        ]
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("ops", [naive, with_torch, op], ids=["naive", "torch", "op"])
def test_gradients(ops):
    x, gate, y, gain = inputs(2, 2)
    check = torch.autograd.gradcheck
    leaves = [part.double().clone().requires_grad_() for part in (x, gate, y, gain)]
    assert check(ops.mix_streams, leaves[:2])
    assert check(ops.add_to_streams, [leaves[0], *leaves[2:]])
