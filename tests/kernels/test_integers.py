"""Products of integers, in each of the ways a processor may have them."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import integers, naive, with_torch
from kernels.linear.packed import Integers
from tests.support.closeness import nmse

# odd sizes: the fast products work in lines of 64 bytes, blocks and panels
SIZES = pytest.mark.parametrize(
    ("n_out", "n_in"), [(1, 1), (7, 5), (33, 130), (96, 256), (100, 64), (31, 192)]
)
ROWS = pytest.mark.parametrize("n_rows", [1, 2, 5, 8, 9, 17, 50])


@pytest.fixture(params=["llvm", "fbgemm", "neither"])
def way(request, monkeypatch) -> str:
    """Which products this processor seems to have."""
    if request.param == "llvm" and not integers.has_vnni():
        pytest.skip("this processor does not multiply bytes in fours")
    if request.param == "fbgemm" and not integers.has_fbgemm():
        pytest.skip("this PyTorch has none")
    if request.param != "llvm":
        monkeypatch.setattr(integers, "has_vnni", lambda: False)
    if request.param == "neither":
        monkeypatch.setattr(integers, "has_fbgemm", lambda: False)
    return request.param


def largest_integer(way: str) -> int:
    return integers.int8_levels() if way == "fbgemm" else 127


def integer_rows(n_rows: int, n_in: int) -> torch.Tensor:
    """Rows that quantise without rounding: whole numbers, the largest of each row 127."""
    rows = torch.randint(-127, 128, (n_rows, n_in)).float()
    rows[:, 0] = 127 * (1 - 2 * (torch.arange(n_rows) % 2))
    return rows


def test_the_way_decides_how_a_matrix_is_packed(way):
    packed = with_torch.pack(torch.randn(4, 8), "int8")
    assert isinstance(packed.data, Integers) == (way != "fbgemm")
    assert packed.n_bytes == 4 * 8 + 4 * 4


@SIZES
@ROWS
def test_integers_are_summed_exactly(way, n_out, n_in, n_rows):
    levels = largest_integer(way)
    weight = torch.randint(-levels, levels + 1, (n_out, n_in))
    weight[:, 0] = levels
    x = integer_rows(n_rows, n_in)
    y = with_torch.linear(x, with_torch.pack(weight.float(), "int8"))
    torch.testing.assert_close(y, (x.long() @ weight.T).float(), rtol=2e-6, atol=0.05)


@ROWS
@pytest.mark.parametrize("sign", [1, -1])
def test_the_worst_case_does_not_saturate(way, n_rows, sign):
    """Every weight and every activation at its largest: pairs add up to the highest sums."""
    packed = with_torch.pack(torch.full((40, 512), 2.0), "int8")
    y = with_torch.linear(torch.full((n_rows, 512), sign * 3.0), packed)
    torch.testing.assert_close(y, torch.full((n_rows, 40), sign * 3072.0))


@SIZES
@ROWS
@pytest.mark.parametrize("mode", ["int8", "int8x2"])
def test_near_the_law(way, n_out, n_in, n_rows, mode):
    weight = torch.randn(n_out, n_in)
    x = torch.randn(n_rows, n_in) * torch.logspace(-3, 3, n_rows)[:, None]
    law = naive.linear(x, naive.pack(weight, mode))
    y = with_torch.linear(x, with_torch.pack(weight, mode))
    if largest_integer(way) == 127:
        torch.testing.assert_close(y, law, rtol=1e-5, atol=1e-6 * float(law.abs().max()))
    else:
        assert nmse(y, law) < 2e-3


@pytest.mark.parametrize("mode", ["int8", "int8x2"])
@pytest.mark.parametrize("n_in", [300, 320])
def test_rows_have_the_same_bits_in_every_batch(way, mode, n_in):
    packed = with_torch.pack(torch.randn(72, n_in), mode)
    x = torch.randn(60, n_in) * torch.logspace(-3, 3, 60).unsqueeze(1)
    together = with_torch.linear(x, packed)
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 48):
        for start in range(0, 60 - width, 5):
            part = slice(start, start + width)
            assert torch.equal(with_torch.linear(x[part], packed), together[part])


@pytest.mark.parametrize("mode", ["int8", "int8x2"])
def test_rows_of_zeros_stay_zero(way, mode):
    x = torch.randn(3, 64)
    x[1] = 0
    y = with_torch.linear(x, with_torch.pack(torch.randn(40, 64), mode))
    assert torch.equal(y[1], torch.zeros(40)) and (y[[0, 2]] != 0).all()
