"""Rows rounded as llama.cpp rounds them: against gguf-py, and block by block in float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.linear import linear, pack
from kernels.linear.block_parts import as_llama_cpp, round_rows
from kernels.linear.blocks import pack_blocks, stack_weights
from tests.support.random_blocks import random_blocks


def rows(n: int, width: int) -> torch.Tensor:
    """Of sizes that differ from block to block, some blocks of zeros."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, width // 32, 32, generator=generator)
    x *= torch.logspace(-4, 3, width // 32).unsqueeze(1)
    x[0, 1] = 0
    return x.flatten(1)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_blocks_of_32_meet_what_gguf_py_makes_of_rows_as_q8_0(type: str) -> None:
    x = rows(3, 512)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), q8_0), q8_0)
    np.testing.assert_array_equal(round_rows(x, type).numpy(), expected)


def naive_q8_k(row: list[float]) -> list[float]:
    """quantize_row_q8_K_ref: the number that is largest in size becomes -127."""
    largest = max(row, key=abs)
    if not largest:
        return [0.0] * len(row)
    scale = -127 / largest
    return [min(127, round(scale * value)) / scale for value in row]


@pytest.mark.parametrize("type", ["Q2_K", "Q4_K", "Q6_K", "IQ3_XXS", "IQ4_XS", "TQ2_0"])
def test_blocks_of_256_meet_q8_k(type: str) -> None:
    x = rows(2, 1024)
    x[1, 256:512] = 0
    expected = [naive_q8_k(block) for block in x.view(-1, 256).tolist()]
    found = round_rows(x, type).view(-1, 256)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


def test_floats_meet_their_own_kind() -> None:
    x = rows(2, 64)
    assert torch.equal(round_rows(x, "F16"), x.half().float())
    assert torch.equal(round_rows(x, "BF16"), x.bfloat16().float())
    packed = as_llama_cpp(pack(torch.randn(5, 64), "f32"), "F32")
    assert packed.rounding is None


@pytest.mark.parametrize("invariant", [False, True])
def test_every_part_rounds_for_its_own_type(invariant: bool) -> None:
    x = rows(3, 256)
    parts = {
        "Q8_0": pack_blocks(random_blocks("Q8_0", 4, 256), "Q8_0"),
        "Q4_K": pack_blocks(random_blocks("Q4_K", 5, 256), "Q4_K"),
        "BF16": pack(torch.randn(6, 256), "f32"),
    }
    joined = stack_weights([as_llama_cpp(part, type) for type, part in parts.items()])
    found = linear(x, joined, invariant=invariant)
    expected = [linear(round_rows(x, t), p, invariant=invariant) for t, p in parts.items()]
    assert torch.equal(found, torch.cat(expected, 1))
    assert not torch.allclose(found, linear(x, stack_weights(list(parts.values()))))
