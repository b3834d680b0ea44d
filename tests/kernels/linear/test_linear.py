"""Matrix products in three compute modes."""

from __future__ import annotations

import pytest
import torch

from kernels import linear as op
from kernels.dispatch import uses_llvm
from kernels.linear import integers, naive, with_torch
from kernels.linear.packed import quantise_rows
from tests.support.closeness import nmse

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [naive, with_torch, op], ids=["naive", "torch", "op"]
)
# odd sizes: the fast products work in blocks
SIZES = pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (7, 5), (33, 130), (96, 256)])


def is_all_of_them(n_bytes: int, n_out: int, n_in: int) -> bool:
    """Whether this counts integers and scales, at most with what fills up sixteens of them."""
    most = (n_out + -n_out % 16) * (n_in + -n_in % 16 + 4)
    return n_out * (n_in + 4) <= n_bytes <= most


@IMPLEMENTATIONS
@SIZES
@pytest.mark.parametrize("leading", [(1,), (6,), (2, 3)])
def test_f32(ops, n_out, n_in, leading):
    x, weight = torch.randn(*leading, n_in), torch.randn(n_out, n_in)
    packed = ops.pack(weight, "f32")
    y = ops.linear(x, packed)
    assert nmse(y, x.double() @ weight.double().T) < 1e-12
    assert (packed.mode, packed.shape, packed.n_bytes) == ("f32", (n_out, n_in), 4 * n_out * n_in)


@pytest.mark.parametrize("n_rows", [1, 5, 40])
def test_plain_matrices_are_taken_as_they_are(n_rows):
    x, weight = torch.randn(2, n_rows, 256), torch.randn(300, 256)
    packed = op.pack(weight, "f32")
    assert (packed.mode, packed.shape, packed.n_bytes) == ("f32", (300, 256), weight.nbytes)
    assert nmse(op.linear(x, packed), x.double() @ weight.double().T) < 1e-12
    if uses_llvm():
        assert packed.data.bytes.data_ptr() == weight.data_ptr()
    together = op.linear(x, packed, invariant=True)
    assert torch.equal(op.linear(x[:1, :3], packed, invariant=True), together[:1, :3])


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_rows", [1, 2, 8, 40])
def test_bf16_rounds_weights_and_activations(ops, n_rows):
    # whole numbers with a trace that 8 bits of mantissa cannot hold: only if both sides are
    # rounded, and nothing else is, the products are whole numbers again
    numbers = torch.randint(1, 4, (n_rows, 16)).float(), torch.randint(1, 4, (24, 16)).float()
    x, weight = (n * (1 + 1e-3 * (torch.rand(n.shape) - 0.5)) for n in numbers)
    y = ops.linear(x, ops.pack(weight, "bf16"))
    assert y.dtype == torch.float32
    assert torch.equal(y, numbers[0] @ numbers[1].T)


@SIZES
@pytest.mark.parametrize("leading", [(1,), (6,), (2, 3)])
def test_bf16_is_near_the_law(n_out, n_in, leading):
    x, weight = torch.randn(*leading, n_in), torch.randn(n_out, n_in)
    law = naive.linear(x, naive.pack(weight, "bf16"))
    y = with_torch.linear(x, with_torch.pack(weight, "bf16"))
    # processors with the instructions round the result to bfloat16 as well
    assert nmse(y, law) < (1e-5 if with_torch.has_bf16() else 1e-12)


@SIZES
def test_quantised_rows_are_the_nearest_integers(n_out, n_in):
    weight = torch.randn(n_out, n_in)
    integers, scale = quantise_rows(weight, 127)
    error = (weight - integers * scale.unsqueeze(1)).abs()
    assert (error <= scale.unsqueeze(1) * 0.50001).all()
    assert (integers.abs().amax(1) == 127).all()


@IMPLEMENTATIONS
@SIZES
@pytest.mark.parametrize("leading", [(1,), (6,), (2, 3)])
def test_int8_is_near_f32(ops, n_out, n_in, leading):
    x, weight = torch.randn(*leading, n_in), torch.randn(n_out, n_in)
    packed = ops.pack(weight, "int8")
    y = ops.linear(x, packed)
    assert y.shape == (*leading, n_out)
    assert nmse(y, x.double() @ weight.double().T) < 2e-3
    assert is_all_of_them(packed.n_bytes, n_out, n_in)


@IMPLEMENTATIONS
def test_int8_keeps_rows_of_zeros_and_of_tiny_numbers(ops):
    weight = torch.randn(5, 16)
    weight[2] = 0
    x = torch.stack((torch.zeros(16), torch.randn(16) * 1e-30, torch.randn(16)))
    y = ops.linear(x, ops.pack(weight, "int8"))
    assert torch.equal(y[0], torch.zeros(5))
    assert torch.equal(y[:, 2], torch.zeros(3))
    assert nmse(y[1] * 1e30, (x[1].double() @ weight.double().T) * 1e30) < 2e-3


@IMPLEMENTATIONS
@SIZES
@pytest.mark.parametrize("leading", [(1,), (6,), (2, 3)])
def test_int8x2_has_activations_of_15_bits(ops, n_out, n_in, leading):
    """With weights that int8 keeps exactly, only the activations are rounded."""
    levels = 127 if ops is naive else integers.weight_levels()
    weight = torch.randint(-levels, levels + 1, (n_out, n_in)).float()
    weight[:, 0] = levels
    x = torch.randn(*leading, n_in)
    packed = ops.pack(weight, "int8x2")
    y, exact = ops.linear(x, packed), x.double() @ weight.double().T
    assert y.shape == (*leading, n_out)
    assert is_all_of_them(packed.n_bytes, n_out, n_in)
    # half a step of 1/254 of 1/127 of the largest, over all weights
    step = x.abs().amax(-1, keepdim=True) / (2 * 254 * 127)
    bound = 1.01 * step * weight.abs().sum(1) + 1e-5 * (x.abs().double() @ weight.abs().double().T)
    assert ((y - exact).abs() <= bound).all()


@pytest.mark.parametrize("mode", op.MODES)
# 2100 numbers: bf16 and f32 products of one row then add up in another order than those of two
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (33, 130), (40, 2100)])
def test_invariant_rows_have_the_same_bits_in_every_batch(mode, n_out, n_in):
    packed = op.pack(torch.randn(n_out, n_in), mode)
    x = torch.randn(150, n_in) * torch.logspace(-3, 3, 150).unsqueeze(1)
    together = op.linear(x, packed, invariant=True)
    assert nmse(together, op.linear(x, packed)) < 1e-4
    for width in (1, 2, 3, 7, 8, 9, 16, 63, 64, 65):
        for start in (0, 5, 83):
            part = slice(start, start + width)
            assert torch.equal(op.linear(x[part], packed, invariant=True), together[part])
    square = op.linear(x.view(15, 10, n_in), packed, invariant=True)
    assert torch.equal(square.flatten(0, 1), together)


def test_invariant_rows_of_a_product_that_sees_its_neighbours():
    """Of such a product single rows remain, which are always right."""

    def coupled(x, packed):
        return x @ packed.data.T + 1e-3 * x.abs().sum()

    packed = op.pack(torch.randn(5, 12), "f32")
    x = torch.randn(20, 12)
    y = op._in_blocks(coupled, x, packed)
    assert torch.equal(y, torch.cat([coupled(row, packed) for row in x.split(1)]))


@pytest.mark.parametrize("mode", ["auto", "", "F32"])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match="f32, bf16, int8"):
        op.pack(torch.ones(2, 2), mode)
