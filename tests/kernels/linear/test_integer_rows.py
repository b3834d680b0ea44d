"""Integer products of few rows, bit for bit as the law has them."""

from __future__ import annotations

import functools
from itertools import cycle

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.linear import integer_blocks
from kernels.linear.block_parts import is_long
from kernels.linear.integer_blocks import TYPES, row_products_with_llvm, rows_with_llvm, with_llvm
from kernels.linear.integer_blocks.rows_with_llvm import write
from kernels.processor import has_feature
from tests.support.byte_sums import added_fours
from tests.support.implementations import Implementation
from tests.support.llvm_assembly import assembly
from tests.support.random_blocks import random_blocks

naive = Implementation(integer_blocks, "naive")

REGISTER = {256: "ymm", 512: "zmm"}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are the same, any NaN counting as any other."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0.0, 1e30, -1e30), expected.nan_to_num(0.0, 1e30, -1e30)
    )


@pytest.mark.parametrize(("turn", "type_name"), list(enumerate(TYPES)))
@pytest.mark.thinned(8)
def test_every_number_of_rows(turn, type_name):
    """Each is a program that takes a tenth of a second to compile: but for 1 and 4, the types have
    one of several in turn."""
    blocks = random_blocks(type_name, 13, 512)
    x = torch.randn(25, 512) * torch.logspace(-3, 3, 25).unsqueeze(1)
    expected = naive.integer_linear(x, blocks, type_name)
    in_turn = (2, 8), (3, 5, 6, 7), (9, 13, 16), (17, 24, 25)
    for n_rows in (1, 4, *(some[turn % len(some)] for some in in_turn)):
        found = with_llvm.integer_linear(x[:n_rows], blocks, type_name)
        assert torch.equal(found, expected[:n_rows])
    x, expected = x[:4], expected[:4]
    nested = with_llvm.integer_linear(x.view(2, 2, 512).transpose(0, 1), blocks, type_name)
    assert torch.equal(nested, expected.view(2, 2, 13).transpose(0, 1))
    assert with_llvm.integer_linear(x[:0], blocks, type_name).shape == (0, 13)


@pytest.mark.parametrize("type_name", [t for t in TYPES if not is_long(t)])
@pytest.mark.parametrize("n_in", [32, 96, 288, 1248])
def test_rows_that_end_within_a_stretch(type_name, n_in):
    n_in += n_in % GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]
    blocks, x = random_blocks(type_name, 5, n_in), torch.randn(4, n_in)
    expected = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(with_llvm.integer_linear(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", [t for t in TYPES if is_long(t)])
@pytest.mark.parametrize("n_in", [256, 768, 1280])
def test_an_odd_number_of_long_blocks(type_name, n_in):
    """Two of them fill a wide vector; what is next to the last one has no part in the sum."""
    blocks, x = random_blocks(type_name, 5, n_in), torch.randn(4, n_in)
    expected = naive.integer_linear(x, blocks, type_name)
    for n_rows in (1, 3, 4):
        found = with_llvm.integer_linear(x[:n_rows], blocks, type_name)
        assert torch.equal(found, expected[:n_rows])


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


@pytest.mark.parametrize(("type_name", "bits"), list(zip(TYPES, cycle((256, 512)))))
def test_products_that_are_summed_in_32_bits(type_name, bits, monkeypatch):
    if bits == 512 and not has_feature("avx512bw"):
        pytest.skip("this processor has no vectors of 512 bits")
    monkeypatch.setattr(row_products_with_llvm, "add_byte_sums", added_fours)
    monkeypatch.setattr(rows_with_llvm, "vector_bits", lambda: bits)
    for cached in ("program", "_prepared"):
        monkeypatch.setattr(rows_with_llvm, cached, getattr(rows_with_llvm, cached).__wrapped__)
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(3, 512)
    y = torch.full((3, 5), torch.nan)
    rows_with_llvm.multiply_rows(x, blocks, type_name, y)
    assert torch.equal(y, naive.integer_linear(x, blocks, type_name))


@pytest.mark.parametrize(
    ("bits", "halved", "expected"),
    [(512, False, 512), (512, True, 256), (256, False, 256), (0, False, 0)],
)
def test_wide_vectors_where_they_are_whole(bits, halved, expected, monkeypatch):
    monkeypatch.setattr(rows_with_llvm, "vnni_bits", lambda: bits)
    monkeypatch.setattr(rows_with_llvm, "halves_512_bits", lambda: halved)
    assert rows_with_llvm.vector_bits() == expected


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_read_fast_is_asked_for_in_the_second_cache(elsewhere, monkeypatch):
    """For few rows, and where that was measured."""
    monkeypatch.setattr(rows_with_llvm, "reads_ahead_into_second_cache", lambda: not elsewhere)
    for type_name, n_rows in (("Q8_0", 1), ("Q8_0", 4), ("Q8_0", 5), ("Q4_K", 1)):
        text = assembly(functools.partial(write, type_name, n_rows, 0), 7, "+avx2,+fma,+f16c")
        second = type_name == "Q8_0" and n_rows <= 4 and not elsewhere
        assert ("prefetcht1" in text, "prefetcht0" in text) == (second, not second)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_code_for_processors_that_add_products_of_bytes(type_name):
    """Of each kind; it cannot run everywhere."""
    for bits, feature in ((256, "avxvnni"), (512, "avx512vnni,+avx512vl,+avx512bw")):
        body = functools.partial(write, type_name, 2, bits)
        text = assembly(body, 7, f"+avx2,+fma,+f16c,+{feature}")
        assert any("vpdpbusd" in line and REGISTER[bits] in line for line in text.splitlines())
