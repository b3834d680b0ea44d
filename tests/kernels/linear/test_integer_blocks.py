"""The law of the integer products, block by block in Python's numbers, and its parts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.linear import integer_blocks as op
from kernels.linear.block_parts import LONG, SHORT, is_long, quantise, split
from tests.support.closeness import nmse
from tests.support.implementations import Implementation
from tests.support.random_blocks import random_blocks

naive = Implementation(op, "naive")

TYPES = pytest.mark.parametrize("type_name", op.TYPES)


@TYPES
def test_parts_are_the_weights_of_gguf_py(type_name):
    ggml = gguf.GGMLQuantizationType[type_name]
    elements, n_bytes = gguf.GGML_QUANT_SIZES[ggml]
    blocks = random_blocks(type_name, 9, 2 * elements)
    parts = split(blocks.unflatten(-1, (-1, n_bytes)), type_name)
    weights = parts.integers.double()
    if parts.group_scales is not None:
        n_groups = parts.group_scales.shape[-1]
        weights = weights.unflatten(-1, (n_groups, -1)) * parts.group_scales.unsqueeze(-1)
        weights = weights.flatten(-2)
    weights = weights * parts.scale.double().unsqueeze(-1)
    if parts.group_minimums is not None:
        less = parts.minimum.double().unsqueeze(-1) * parts.group_minimums
        weights = weights - less.repeat_interleave(elements // less.shape[-1], -1)
    elif parts.minimum is not None:
        weights = weights + parts.minimum.double().unsqueeze(-1)
    expected = gguf.quants.dequantize(blocks.numpy(), ggml)
    np.testing.assert_allclose(weights.flatten(1), expected, rtol=1e-6, atol=1e-6)


def test_short_rows_are_gguf_pys_q8_0():
    x = torch.randn(3, 8, SHORT) * torch.logspace(-3, 3, 8).unsqueeze(1)
    x[0, 1] = 0
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    blocks = torch.from_numpy(gguf.quants.quantize(x.flatten(1).numpy(), q8_0)).view(3, 8, 34)
    found = quantise(x.flatten(1), long=False)
    assert torch.equal(found.integers, blocks[..., 2:].view(torch.int8).long())
    assert torch.equal(found.scales, blocks[..., :2].clone().view(torch.float16)[..., 0].float())
    exact = (x.abs().amax(-1) / 127) * found.integers.sum(-1)
    assert torch.equal(found.sums, exact.half().float())


def test_long_rows_are_q8_k():
    x = torch.randn(3, 2, LONG) * torch.tensor([0.01, 30.0]).unsqueeze(1)
    x[0, 1] = 0
    found = quantise(x.flatten(1), long=True)
    for integers, scale, block in zip(
        found.integers.view(-1, LONG),
        found.scales.flatten(),
        x.numpy().reshape(-1, LONG),
        strict=True,
    ):
        # ggml's sign is that of the largest number, in the integers and in the scale
        largest = block[np.abs(block).argmax()]
        if largest == 0:
            assert not integers.any() and scale == 0
            continue
        factor = np.float32(-127) / largest
        sign = -np.sign(largest)
        assert sign * scale.item() == np.float32(1) / factor
        np.testing.assert_array_equal(sign * integers.numpy(), np.rint(factor * block))


@TYPES
def test_products_are_those_of_gguf_pys_weights(type_name):
    """With rows that are whole numbers times their scale already."""
    n_in = 512
    blocks = random_blocks(type_name, 7, n_in)
    x = torch.randint(-127, 128, (2, 3, n_in)).float() / 64
    x[..., :: LONG if is_long(type_name) else SHORT] = 127 / 64
    weight = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])
    y = naive.integer_linear(x, blocks, type_name)
    assert y.shape == (2, 3, 7)
    # a minimum of Q4_1 and Q5_1 meets a sum that is rounded to f16
    bound = 1e-6 if type_name in ("Q4_1", "Q5_1") else 1e-12
    assert nmse(y, x.double() @ torch.from_numpy(weight).double().T) < bound


@TYPES
@pytest.mark.thinned(4)
def test_rounding_of_rows_is_all_that_an_integer_product_loses(type_name):
    blocks, x = random_blocks(type_name, 16, 1024), torch.randn(5, 1024)
    weight = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])
    y = op.integer_linear(x, blocks, type_name)
    assert nmse(y, x.double() @ torch.from_numpy(weight).double().T) < 1e-3


def test_the_order_of_short_sums():
    """Blocks whose sums come out differently in any other order."""
    blocks = torch.zeros(1, 10, 34, dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([1.0]).half().view(torch.uint8)
    blocks[..., 2] = 1
    x = torch.zeros(1, 10, SHORT)
    scales = torch.tensor([60000.0, 2**-10, -60000, 2**-10, 1, 2**-12, 2**-12, -1, 3, 5])
    x[..., 0] = scales * 127
    found = naive.integer_linear(x.view(1, -1), blocks.view(1, -1), "Q8_0").item()
    p = [np.float32(s) * np.float32(127) for s in quantise(x.view(1, -1), long=False).scales[0]]
    p = [a * np.float32(np.sign(s)) for a, s in zip(p, scales.tolist(), strict=True)]
    assert p[0] == -p[2] > 1e6
    first = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    assert found == first + (p[8] + p[9])
    assert found != sum(p, np.float32(0))


@pytest.mark.parametrize(("bits", "number"), [(0, 0), (1, 2.0**-10), (0x7E, 224), (0x7F, 0)])
def test_edges_of_the_scales_of_nvfp4(bits, number):
    """Of which the largest one without a sign would be a NaN, and counts as 0."""
    blocks = torch.full((1, 36), 0x11, dtype=torch.uint8)
    blocks[:, :4] = bits
    x = torch.ones(1, 64)
    for product in (naive.integer_linear, op.integer_linear):
        found = product(x, blocks, "NVFP4").item()
        assert found == pytest.approx(64 * number, rel=1e-3)


@TYPES
@pytest.mark.thinned(4)
def test_a_row_with_a_number_that_is_none_gives_nan(type_name):
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(4, 512)
    expected = op.integer_linear(x, blocks, type_name)
    x[0, 3], x[2, 300] = torch.inf, torch.nan
    y = op.integer_linear(x, blocks, type_name)
    assert y[[0, 2]].isnan().all()
    assert torch.equal(y[[1, 3]], expected[[1, 3]])


@pytest.mark.parametrize("type_name", ["Q8_K", "F16"])
def test_other_types_are_refused(type_name):
    with pytest.raises(ValueError, match=f"{type_name}, only with Q4_0, Q4_1"):
        op.integer_linear(torch.ones(1, 32), torch.zeros(1, 22, dtype=torch.uint8), type_name)


@pytest.mark.parametrize(("n_in", "n_bytes"), [(64, 34), (64, 102), (64, 69), (63, 68)])
def test_rows_of_another_length_are_refused(n_in, n_bytes):
    blocks = torch.zeros(3, n_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{n_bytes} bytes are no row of {n_in} Q8_0"):
        op.integer_linear(torch.ones(1, n_in), blocks, "Q8_0")
