"""Products straight from GGUF blocks, against the weights that gguf-py expands."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import block_linear
from kernels.linear.block_linear import TYPES, with_triton
from kernels.linear.dequant import dequantise
from tests.support.closeness import nmse
from tests.support.implementations import Implementation
from tests.support.random_blocks import random_blocks

naive = Implementation(block_linear, "naive")

EVERY_TYPE = pytest.mark.parametrize("type_name", TYPES)


@EVERY_TYPE
def test_the_weights_are_those_of_gguf_to_the_bit(device, type_name):
    """Rows that are one at one place and zero elsewhere read the weights out."""
    n_in = 256
    blocks, x = random_blocks(type_name, 4, n_in), torch.eye(n_in)
    if device == "cpu":  # some of all places: the interpreter takes long
        x = x[torch.cat((torch.arange(0, n_in, 7), torch.arange(1, 33)))]
    y = with_triton.block_linear(x.to(device), blocks.to(device), type_name)
    weight = dequantise(blocks.flatten(), type_name, 4 * n_in).view(4, n_in)
    assert torch.equal(y.cpu() + 0.0, x @ weight.T + 0.0)


@EVERY_TYPE
@pytest.mark.parametrize("n_rows", [1, 5, 17])
@pytest.mark.thinned(6)
def test_products(device, type_name, n_rows):
    """Columns and groups that fill no whole program."""
    n_in = 768 if type_name.endswith("K") else 608
    blocks, x = random_blocks(type_name, 7, n_in, seed=n_rows), torch.randn(n_rows, n_in)
    y = with_triton.block_linear(x.to(device), blocks.to(device), type_name)
    assert y.shape == (n_rows, 7)
    assert nmse(y.cpu(), naive.block_linear(x, blocks, type_name)) < 1e-11


@EVERY_TYPE
def test_bf16_rows_and_any_strides(device, type_name):
    blocks, x = random_blocks(type_name, 5, 256), torch.randn(256, 2, 3).to(torch.bfloat16)
    y = with_triton.block_linear(x.permute(1, 2, 0).to(device), blocks.to(device), type_name)
    assert y.dtype == torch.float32 and y.shape == (2, 3, 5)
    assert nmse(y.cpu(), naive.block_linear(x.permute(1, 2, 0), blocks, type_name)) < 1e-11
    every_second = torch.stack((x.permute(1, 2, 0),) * 2, -1)[..., 0].to(device)
    again = with_triton.block_linear(every_second, blocks.to(device), type_name)
    assert torch.equal(again, y)


@EVERY_TYPE
def test_tiny_and_negative_scales(device, type_name):
    """Subnormal float16 scales come through as they are."""
    blocks = random_blocks(type_name, 3, 256)
    start = 208 if type_name == "Q6_K" else 0
    blocks[1, start : start + 2] = torch.tensor([0x01, 0x80], dtype=torch.uint8)
    blocks[2, start : start + 2] = torch.tensor([0xFF, 0x03], dtype=torch.uint8)
    x = torch.randn(2, 256)
    y = with_triton.block_linear(x.to(device), blocks.to(device), type_name).cpu()
    wanted = naive.block_linear(x, blocks, type_name)
    for column in range(3):
        assert nmse(y[:, column], wanted[:, column]) < 1e-11
