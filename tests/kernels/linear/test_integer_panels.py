"""Integer products of many rows, bit for bit as the law has them."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.linear import integer_blocks
from kernels.linear.block_parts import is_long
from kernels.linear.integer_blocks import TYPES, panel_products_with_llvm
from kernels.linear.integer_blocks import with_llvm as panels_with_llvm
from kernels.linear.integer_blocks.activations_with_llvm import FORMS
from kernels.linear.integer_blocks.panel_layout import panel
from kernels.linear.integer_blocks.with_llvm import CACHED, multiply_panels
from kernels.llvm import program
from kernels.processor import has_feature, vnni_bits
from tests.support.byte_sums import added_fours
from tests.support.implementations import Implementation
from tests.support.llvm_assembly import assembly
from tests.support.random_blocks import random_blocks

naive = Implementation(integer_blocks, "naive")

HERE = panel("Q4_0", vnni=vnni_bits())
OUTPUTS, TALL = HERE.outputs, HERE.tall


def product(x: torch.Tensor, blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    y = torch.full((len(x), len(blocks)), torch.nan)
    multiply_panels(x, blocks, type_name, y)
    return y


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are the same, any NaN counting as any other."""
    return torch.equal(found.nan_to_num(12345.0), expected.nan_to_num(12345.0))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_out", [1, OUTPUTS, 2 * OUTPUTS + 3])
@pytest.mark.thinned(12)
def test_every_edge(type_name, n_out):
    blocks = random_blocks(type_name, n_out, 768)
    x = torch.randn(9, 768) * torch.logspace(-3, 3, 9).unsqueeze(1)
    expected = naive.integer_linear(x, blocks, type_name)
    for n_rows in (1, 2, TALL, TALL + 1, 9):
        assert torch.equal(product(x[:n_rows], blocks, type_name), expected[:n_rows])


@pytest.mark.parametrize("type_name", [t for t in TYPES if not is_long(t)])
@pytest.mark.parametrize("n_in", [32, 224, 288, 1248])
def test_rows_that_end_within_a_stretch(type_name, n_in):
    n_in += n_in % GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]
    blocks, x = random_blocks(type_name, 5, n_in), torch.randn(5, n_in)
    expected = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(product(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
def test_more_rows_than_stay_in_the_cache(type_name):
    n_rows = CACHED + 2
    blocks, x = random_blocks(type_name, 17, 512), torch.randn(n_rows, 512)
    expected = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(product(x, blocks, type_name), expected)


def test_threads_share_the_panels():
    blocks, x = random_blocks("Q4_K", 40 * OUTPUTS - 5, 512), torch.randn(11, 512)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(product(x, blocks, "Q4_K"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][:, -40:], naive.integer_linear(x, blocks[-40:], "Q4_K"))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def largest_rows(n_in: int) -> torch.Tensor:
    """Rows whose integers are as large as can be, of one sign and of both."""
    x = torch.full((4, n_in), 127.0)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, ::7] = 0
    return x


@pytest.mark.parametrize("type_name", TYPES)
def test_the_largest_integers(type_name):
    x = largest_rows(512)
    for fill in (0x00, 0xFF, 0x80, 0x7F, 0x88, 0x77, 0xF0, 0x0F):
        blocks = random_blocks(type_name, 3, 512, fill=fill)
        expected = naive.integer_linear(x, blocks, type_name)
        assert torch.equal(product(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", "Q4_K", "IQ4_XS"])
def test_numbers_that_are_none_or_overflow(type_name):
    """They do not touch the rows next to them."""
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(6, 512)
    expected = naive.integer_linear(x, blocks, type_name)
    for number in (torch.inf, -torch.inf, torch.nan, 3e38, 1e-40, -1e7):
        x[1] = torch.randn(512)
        x[1, 300] = number
        found = product(x, blocks, type_name)
        assert same(found, naive.integer_linear(x, blocks, type_name))
        assert torch.equal(found[[0, 2, 3, 4, 5]], expected[[0, 2, 3, 4, 5]])


def test_weights_behind_the_end_do_not_count():
    """A scale that is not a number, in the last of three blocks of a stretch for eight."""
    blocks, x = random_blocks("Q4_1", 3, 96), torch.randn(5, 96)
    blocks[1, 40:44] = torch.tensor([0, 0x7E, 0, 0x7C], dtype=torch.uint8)
    found = product(x, blocks, "Q4_1")
    assert same(found, naive.integer_linear(x, blocks, "Q4_1"))
    assert found[:, 1].isnan().all() and found[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize("type_name", TYPES)
def test_sums_of_16_bits_hold_their_products(type_name):
    """And as many of them as a power of two can be."""
    form, how = FORMS[type_name], panel(type_name, vnni=0)
    most = 128 if form.most is None else max(form.offset, form.most - form.offset)
    pair = 2 * most * (255 if how.signed else 127)
    assert how.words == (pair >= 2**15)
    assert how.words or how.together * pair < 2**15 <= 2 * how.together * pair


@pytest.mark.parametrize(("type_name", "bits"), list(zip(TYPES, cycle((256, 512)))))
@pytest.mark.thinned(8)
def test_products_that_are_summed_in_32_bits(type_name, bits, monkeypatch):
    if bits == 512 and not has_feature("avx512bw"):
        pytest.skip("this processor has no vectors of 512 bits")
    monkeypatch.setattr(panel_products_with_llvm, "add_byte_sums", added_fours)
    monkeypatch.setattr(panels_with_llvm, "vnni_bits", lambda: bits)
    monkeypatch.setattr(panels_with_llvm, "program", panels_with_llvm.program.__wrapped__)
    blocks = random_blocks(type_name, 33, 512)
    x = torch.cat([torch.randn(5, 512), largest_rows(512)])
    expected = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(product(x, blocks, type_name), expected)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
@pytest.mark.thinned(4)
def test_code_for_processors_that_add_products_of_bytes(type_name, monkeypatch):
    """It cannot run everywhere."""
    monkeypatch.setattr(program, "Program", lambda body, n_args, before: body)
    for bits, feature in ((256, "avxvnni"), (512, "avx512vnni,+avx512vl,+avx512bw")):
        body = panels_with_llvm.program.__wrapped__(type_name, bits)
        text = assembly(body, 7, f"+avx2,+fma,+f16c,+{feature}")
        assert "vpdpbusd" in text and "vpmaddubsw" not in text
        assert ("zmm" in text) == (bits == 512)
