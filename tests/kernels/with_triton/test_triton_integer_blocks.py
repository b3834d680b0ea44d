"""Integer products on a GPU: the bits of the law, in any batch."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import block_linear as blocks_op
from kernels.linear import integer_blocks as op
from kernels.linear.block_linear import with_triton as blocks_with_triton
from kernels.linear.block_parts import is_long
from kernels.linear.integer_blocks import with_triton
from tests.kernels.with_triton.conftest import INTERPRETED
from tests.support.closeness import nmse
from tests.support.implementations import Implementation
from tests.support.random_blocks import random_blocks

naive = Implementation(op, "naive")
exact = Implementation(blocks_op, "naive")

# a block of zeros has no factor: numpy, in which the interpreter counts, says so
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TYPES = pytest.mark.parametrize("type_name", op.GPU_TYPES)


@TYPES
@pytest.mark.parametrize("n_rows", [1, 3, 9])
@pytest.mark.thinned(10)
def test_the_bits_are_those_of_the_law(device, type_name, n_rows):
    """Stretches that are not whole, rows of weights and of x that fill no program."""
    n_in = 512 if is_long(type_name) else 352
    blocks = random_blocks(type_name, 5, n_in, seed=n_rows)
    x = torch.randn(n_rows, n_in) * torch.logspace(-2, 2, n_in)
    y = with_triton.integer_linear(x.to(device), blocks.to(device), type_name).cpu()
    wanted = naive.integer_linear(x, blocks, type_name)
    if INTERPRETED and type_name in ("Q4_1", "Q5_1"):  # the interpreter rounds an fma twice
        assert nmse(y, wanted) < 1e-12
    else:
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
def test_numbers_that_are_none(device, type_name):
    blocks, x = random_blocks(type_name, 2, 512), torch.randn(4, 512)
    x[0, 3], x[1, 300], x[2, :256], x[3, 256:] = torch.inf, torch.nan, 0.0, 1e-42
    y = with_triton.integer_linear(x.to(device), blocks.to(device), type_name).cpu()
    wanted = naive.integer_linear(x, blocks, type_name)
    assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "Q2_K"])
def test_many_rows_are_multiplied_as_bfloat16(device, type_name, monkeypatch):
    if INTERPRETED:  # of the vendor's libraries only CUDA's gives f32
        mm = torch.mm
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.float(), b.float()))
    monkeypatch.setattr(with_triton, "FEW_ROWS", 4)
    monkeypatch.setattr(blocks_with_triton, "MOST_EXPANDED", 1024)
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(6, 512)
    given = x.to(device), blocks.to(device), type_name
    y = with_triton.integer_linear(*given).cpu()
    weight = blocks_op.dequantise(blocks.flatten(), type_name, 5 * 512).view(5, 512)
    bound = 1e-4 if INTERPRETED else 1e-10  # the interpreter cuts digits off instead of rounding
    assert nmse(y, x.bfloat16().float() @ weight.bfloat16().float().T) < bound
    y = with_triton.integer_linear(*given, invariant=True).cpu()
    assert torch.equal(y, naive.integer_linear(x, blocks, type_name))


@pytest.mark.parametrize("type_name", blocks_op.TYPES)
def test_exact_weights_of_many_rows(device, type_name, monkeypatch):
    monkeypatch.setattr(blocks_with_triton, "FEW_ROWS", 4)
    blocks, x = random_blocks(type_name, 5, 512), torch.randn(6, 512)
    y = blocks_with_triton.block_linear(x.to(device), blocks.to(device), type_name).cpu()
    assert nmse(y, exact.block_linear(x, blocks, type_name)) < 1e-11


def test_tiles_do_not_depend_on_more_than_shapes():
    assert with_triton.columns_of(1, 2560) == 2
    assert with_triton.columns_of(1, 151936) == 8
    assert with_triton.columns_of(4, 18432) == 2
    assert with_triton.columns_of(8, 18432) == 1
