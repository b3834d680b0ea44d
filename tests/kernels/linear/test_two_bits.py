"""Rows rounded to blocks of Q2_K, read back by gguf-py."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels.dispatch import torch_version, uses_llvm
from kernels.linear.two_bits import two_bits


def read_back(blocks: torch.Tensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType.Q2_K
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind).copy())


@pytest.mark.parametrize("width", [256, 1024])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_most_of_the_variance_stays(width: int, scale: float) -> None:
    rows = torch.randn(40, width, generator=torch.Generator().manual_seed(1)) * scale
    blocks = two_bits(rows)
    assert blocks.shape == (40, width // 256 * 84) and blocks.dtype is torch.uint8
    lost = (read_back(blocks) - rows).var() / rows.var()
    assert lost < 0.14


def test_what_two_bits_hold_stays_as_it_is() -> None:
    levels = torch.arange(4).repeat(64).float()
    rows = torch.stack([levels, levels - 2, levels * 0, levels * 0 + 3, levels * 0 - 3])
    assert torch.allclose(read_back(two_bits(rows)), rows, atol=2e-3)


def test_large_and_small_numbers_of_a_row_do_not_mix() -> None:
    rows = torch.cat([torch.full((1, 256), 1e-2), torch.full((1, 256), 300.0)], 1)
    found = read_back(two_bits(rows))
    assert torch.allclose(found, rows, rtol=1e-2)


@pytest.mark.skipif(not uses_llvm(), reason="kernels that are not compiled")
def test_compiled_they_are_the_same_blocks() -> None:
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(300, 512, generator=random) * torch.rand(300, 1, generator=random) ** 9
    rows[0], rows[1, :256], rows[2, 7] = 0, 1e-9, 1e4
    assert torch.equal(two_bits(rows), torch_version(two_bits)(rows))
