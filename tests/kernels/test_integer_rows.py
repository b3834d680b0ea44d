"""Integer products of few rows, bit for bit as the law has them."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels.integer_blocks import TYPES, naive, with_llvm
from kernels.integer_blocks.rows_of_integers import is_long
from kernels.integer_blocks.rows_with_llvm import write
from tests.support.llvm_assembly import assembly
from tests.support.random_blocks import random_blocks

LONG = ["vpdpwssd", "vpmaddwd"]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are the same, any NaN counting as any other."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0.0, 1e30, -1e30), expected.nan_to_num(0.0, 1e30, -1e30)
    )


@pytest.mark.parametrize("type_name", TYPES)
def test_every_number_of_rows(type_name):
    blocks = random_blocks(type_name, 13, 512)
    x = torch.randn(9, 512) * torch.logspace(-3, 3, 9).unsqueeze(1)
    expected = naive.integer_linear(x, blocks, type_name)
    for n_rows in (1, 2, 3, 4, 5, 8, 9):
        found = with_llvm.integer_linear(x[:n_rows], blocks, type_name)
        assert torch.equal(found, expected[:n_rows])
    nested = with_llvm.integer_linear(x.view(3, 3, 512).transpose(0, 1), blocks, type_name)
    assert torch.equal(nested, expected.view(3, 3, 13).transpose(0, 1))
    assert with_llvm.integer_linear(x[:0], blocks, type_name).shape == (0, 13)


@pytest.mark.parametrize("type_name", [t for t in TYPES if not is_long(t)])
@pytest.mark.parametrize("n_in", [32, 96, 288, 1248])
def test_rows_that_end_within_a_stretch(type_name, n_in):
    blocks, x = random_blocks(type_name, 5, n_in), torch.randn(4, n_in)
    expected = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(with_llvm.integer_linear(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_the_largest_integers(type_name):
    x = torch.full((4, 512), 127.0)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, ::7] = 0
    for fill in (0x00, 0xFF, 0x80, 0x7F, 0x88, 0x77, 0xF0, 0x0F):
        blocks = random_blocks(type_name, 3, 512, fill=fill)
        expected = naive.integer_linear(x, blocks, type_name)
        assert torch.equal(with_llvm.integer_linear(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "Q4_K", "IQ4_XS"])
def test_numbers_that_are_none_or_overflow(type_name):
    """NaN in the rows concerned alone; above what f16 holds, infinite sums or none at all."""
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(4, 512)
    expected = naive.integer_linear(x, blocks, type_name)
    for number in (torch.inf, -torch.inf, torch.nan, 3e38, 1e-40, -1e7):
        x[1] = torch.randn(512)
        x[1, 300] = number
        found = with_llvm.integer_linear(x, blocks, type_name)
        assert same(found, naive.integer_linear(x, blocks, type_name))
        assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize("type_name", TYPES)
def test_code_for_processors_that_add_products_of_bytes(type_name):
    """Of both kinds; it cannot run everywhere."""
    for feature in ("avxvnni", "avx512vnni,+avx512vl"):
        features = f"+avx2,+fma,+f16c,+{feature}"
        text = assembly(functools.partial(write, type_name, 2, True), 7, features)
        # LLVM takes two instructions for one where it thinks they are faster
        assert any(name in text for name in (LONG if is_long(type_name) else ["vpdpbusd"]))
