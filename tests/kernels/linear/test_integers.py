"""Products of integers, in each of the ways a processor may have them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.linear import finish_rows, integers, multiply_rows, naive, prepare_rows, with_torch
from kernels.linear.packed import BytePanels, quantise_rows, split_rows

# odd sizes: the fast products work in vectors, panels and pairs of panels
SIZES = pytest.mark.parametrize(
    ("n_out", "n_in"), [(1, 1), (7, 5), (16, 16), (33, 130), (96, 256), (100, 64), (31, 192)]
)
ROWS = pytest.mark.parametrize("n_rows", [1, 2, 5, 8, 9, 17, 50])
MODES = pytest.mark.parametrize("mode", ["int8", "int8x2"])
needs_vnni = pytest.mark.skipif(
    not integers.has_vnni(), reason="this processor does not multiply bytes in fours"
)


@pytest.fixture(params=["llvm", "fbgemm", "fbgemm, 7 bits", "neither"])
def way(request, monkeypatch) -> str:
    """Which products this processor seems to have."""
    if request.param == "llvm" and not integers.has_vnni():
        pytest.skip("this processor does not multiply bytes in fours")
    if "fbgemm" in request.param and not integers.has_fbgemm():
        pytest.skip("this PyTorch has none")
    if request.param == "fbgemm, 7 bits":
        monkeypatch.setattr(integers, "fbgemm_levels", lambda: integers.SAFE_LEVELS)
    if request.param != "llvm":
        monkeypatch.setattr(integers, "has_vnni", lambda: False)
    if request.param == "neither":
        monkeypatch.setattr(integers, "has_fbgemm", lambda: False)
    return request.param


def integer_rows(n_rows: int, n_in: int) -> torch.Tensor:
    """Rows that quantise without rounding: whole numbers, the largest of each row 127."""
    rows = torch.randint(-127, 128, (n_rows, n_in)).float()
    rows[:, 0] = 127 * (1 - 2 * (torch.arange(n_rows) % 2))
    return rows


def rows_of_all_sizes(n_rows: int, n_in: int) -> torch.Tensor:
    return torch.randn(n_rows, n_in) * torch.logspace(-3, 3, n_rows)[:, None]


def by_hand(x: torch.Tensor, weight: torch.Tensor, mode: str) -> torch.Tensor:
    """Sums in whole numbers, then every scale as an f32 by itself."""
    whole, scale = quantise_rows(weight, 127)
    first, second, largest = split_rows(x)
    high, low = ((rows.long() @ whole.long().T).float() for rows in (first, second))
    sums = high if mode == "int8" else low / 254 + high
    return sums * largest * (scale / 127)


def test_the_way_decides_how_a_matrix_is_packed(way):
    expected = {"fbgemm": integers.fbgemm_levels(), "fbgemm, 7 bits": 64}.get(way, 127)
    assert integers.weight_levels() == expected
    packed = with_torch.pack(torch.randn(16, 32), "int8")
    assert isinstance(packed.data, BytePanels) == (way == "llvm")
    assert isinstance(packed.data, tuple) == (way == "neither")
    assert packed.n_bytes == 16 * 32 + 4 * 16


@needs_vnni
@MODES
@SIZES
def test_bytes_are_counted_with_what_fills_them_up(mode, n_out, n_in):
    packed = with_torch.pack(torch.randn(n_out, n_in), mode)
    n_panels, whole = -(-n_out // 16), -(-n_in // 16) * 16
    assert packed.n_bytes == n_panels * 16 * (whole + 4)
    assert packed.data.bytes.shape == (n_panels, whole // 4, 16, 4)


@needs_vnni
@MODES
@SIZES
def test_every_bit_is_that_of_whole_numbers(mode, n_out, n_in):
    weight = torch.randn(n_out, n_in)
    packed = with_torch.pack(weight, mode)
    for n_rows in range(1, 34):
        x = rows_of_all_sizes(n_rows, n_in)
        assert torch.equal(with_torch.linear(x, packed), by_hand(x, weight, mode))


@needs_vnni
@MODES
@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_rows", [1, 3, 40])
def test_threads_share_the_panels(mode, n_threads, n_rows, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    weight, x = torch.randn(1000, 320), rows_of_all_sizes(n_rows, 320)
    packed = with_torch.pack(weight, mode)
    assert torch.equal(with_torch.linear(x, packed), by_hand(x, weight, mode))


@MODES
@pytest.mark.parametrize("n_in", [40, 64])
def test_rows_anywhere_in_memory(way, mode, n_in):
    packed = with_torch.pack(torch.randn(40, n_in), mode)
    for x in (
        torch.randn(3, 4, n_in),
        torch.randn(6, 2 * n_in)[:, n_in:],
        torch.randn(5, 3, 2, n_in)[:, :, 1],
        torch.randn(n_in, 7).T,
        torch.randn(4, 1, n_in).expand(4, 5, n_in),
    ):
        y = with_torch.linear(x, packed)
        assert y.shape == (*x.shape[:-1], 40)
        assert torch.equal(y, with_torch.linear(x.contiguous(), packed))
        assert torch.equal(y[1:2], with_torch.linear(x[1:2].clone(), packed))


def test_no_rows(way):
    packed = with_torch.pack(torch.randn(40, 64), "int8")
    assert with_torch.linear(torch.randn(0, 64), packed).shape == (0, 40)


@SIZES
@ROWS
def test_integers_are_summed_exactly(way, n_out, n_in, n_rows):
    levels = integers.weight_levels()
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


@MODES
@SIZES
@ROWS
def test_near_the_law(way, mode, n_out, n_in, n_rows):
    weight, x = torch.randn(n_out, n_in), rows_of_all_sizes(n_rows, n_in)
    x[n_rows // 2] = 0
    law = naive.linear(x, naive.pack(weight, mode, integers.weight_levels()))
    y = with_torch.linear(x, with_torch.pack(weight, mode))
    torch.testing.assert_close(y, law, rtol=1e-5, atol=1e-6 * float(law.abs().max()))
    assert torch.equal(y[n_rows // 2], torch.zeros(n_out))


@MODES
@pytest.mark.parametrize("n_rows", [3, 20])
def test_rows_that_are_no_numbers_become_nan(mode, n_rows):
    """They alone: next to them nothing changes."""
    packed = with_torch.pack(torch.randn(40, 64), mode)
    x = torch.randn(n_rows, 64)
    expected = with_torch.linear(x, packed)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[1, 5] = value
        y = with_torch.linear(x, packed)
        if integers.has_vnni():
            assert y[1].isnan().all()
        others = torch.arange(n_rows) != 1
        assert torch.equal(y[others], expected[others])
    assert naive.linear(x, naive.pack(torch.randn(40, 64), mode))[1].isnan().all()


@MODES
@pytest.mark.parametrize("n_in", [300, 320])
def test_rows_have_the_same_bits_in_every_batch(way, mode, n_in):
    packed = with_torch.pack(torch.randn(72, n_in), mode)
    x = rows_of_all_sizes(60, n_in)
    together = with_torch.linear(x, packed)
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 48):
        for start in range(0, 60 - width, 5):
            part = slice(start, start + width)
            assert torch.equal(with_torch.linear(x[part], packed), together[part])


@MODES
@ROWS
@pytest.mark.parametrize("n_in", [130, 256])
def test_rows_prepared_once_for_many_matrices(way, mode, n_rows, n_in):
    x = rows_of_all_sizes(n_rows, n_in)
    matrices = [with_torch.pack(torch.randn(n_out, n_in), mode) for n_out in (40, 17)]
    rows, scale = prepare_rows(x, matrices[0])
    picked = torch.arange(n_rows).flip(0)
    for packed in matrices:
        part = None if scale is None else scale.index_select(0, picked)
        y = finish_rows(multiply_rows(rows.index_select(0, picked), packed), part)
        expected = with_torch.linear(x.flip(0), packed)
        bound = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=0.0 if way == "llvm" else bound)


@needs_vnni
def test_what_fills_rows_up_weighs_nothing():
    """As if the zeros had been there."""
    weight, x = torch.randn(20, 50), torch.randn(9, 50)
    filled = [functional.pad(part, (0, 14)) for part in (weight, x)]
    y = with_torch.linear(x, with_torch.pack(weight, "int8"))
    assert torch.equal(y, with_torch.linear(filled[1], with_torch.pack(filled[0], "int8")))
