"""Products with GGUF blocks: against gguf-py's weights."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels import block_linear as op
from kernels.block_linear import naive, with_torch
from tests.support.closeness import nmse
from tests.support.random_blocks import random_blocks

IMPLEMENTATIONS = pytest.mark.parametrize(
    "run",
    [naive.block_linear, with_torch.block_linear, op.block_linear],
    ids=["naive", "torch", "op"],
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("type_name", op.TYPES)
@pytest.mark.parametrize("leading", [(1,), (2, 3)])
def test_products_with_gguf_weights(run, type_name, leading):
    blocks, x = random_blocks(type_name, 7, 512), torch.randn(*leading, 512)
    weight = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])
    y = run(x, blocks, type_name)
    assert y.shape == (*leading, 7)
    assert nmse(y, x.double() @ torch.from_numpy(weight).double().T) < 1e-12
    half = run(x.to(torch.bfloat16), blocks, type_name)
    assert half.dtype == torch.float32
    assert torch.equal(half, run(x.to(torch.bfloat16).float(), blocks, type_name))


@pytest.mark.parametrize("type_name", ["Q5_0", "F32", "IQ4_XS"])
def test_other_types_are_refused(type_name):
    with pytest.raises(ValueError, match=f"{type_name}, only with Q8_0, Q4_0"):
        op.block_linear(torch.ones(1, 32), torch.zeros(1, 22, dtype=torch.uint8), type_name)


@pytest.mark.parametrize(("n_in", "n_bytes"), [(64, 34), (64, 102), (64, 69), (63, 68)])
def test_rows_of_another_length_are_refused(n_in, n_bytes):
    blocks = torch.zeros(3, n_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{n_bytes} bytes are no row of {n_in} Q8_0"):
        op.block_linear(torch.ones(1, n_in), blocks, "Q8_0")
