"""The buffer of quantised rows against kernels.integer_blocks.rows_of_integers."""

from __future__ import annotations

import pytest
import torch

from kernels.integer_blocks.activations_with_llvm import STRETCH, Layout, quantise
from kernels.integer_blocks.rows_of_integers import LONG, SHORT
from kernels.integer_blocks.rows_of_integers import quantise as quantise_in_torch


def hard_rows(n_in: int) -> torch.Tensor:
    """Common rows, and in the others every kind of number that is hard to round."""
    x = torch.randn(12, n_in)
    x[1] *= torch.logspace(-44, 38, n_in)
    x[2] = 0
    x[3] = torch.arange(n_in) % 255 - 127
    x[4] = (torch.arange(n_in) % 253 - 126) + 0.5
    x[4, ::SHORT] = 127
    x[5] = 1e-40
    x[6] = -3e38
    x[7, 5::40] = torch.inf
    x[8, 7::40] = -torch.nan
    x[9] *= 1e-37
    x[10] *= 2e6
    x[11] = -0.0
    return x


def section(rows: torch.Tensor, start: int, n_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    return rows[:, start : start + n_bytes].clone().view(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(12345.0, 1e30), expected.nan_to_num(12345.0, 1e30))


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("n_in", [32, 224, 256, 288, 1024])
def test_short_rows(n_in: int, words: bool) -> None:
    layout, x, n = Layout(False, words), hard_rows(n_in), -(-n_in // STRETCH)
    rows, law = quantise(x, layout), quantise_in_torch(x, long=False)
    assert rows.shape == (12, layout.row_bytes(n))
    filling = (0, n * STRETCH // SHORT - n_in // SHORT)
    pad = torch.nn.functional.pad
    integers = section(rows, 0, layout.integers_step * n, torch.int16 if words else torch.int8)
    assert torch.equal(integers.view(12, -1, SHORT).long(), pad(law.integers, (0, 0, *filling)))
    step = n * layout.sums_step
    sums = section(rows, layout.sums(n), step, torch.int32)
    assert torch.equal(sums.long(), pad(law.integers.sum(-1), filling))
    assert equal(section(rows, layout.scales(n), step, torch.float32), pad(law.scales, filling))
    scaled = section(rows, layout.scaled_sums(n), step, torch.float32)
    assert law.sums is not None and equal(scaled, pad(law.sums, filling))


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("n_in", [256, 1024])
def test_long_rows(n_in: int, words: bool) -> None:
    layout, x, n = Layout(True, words), hard_rows(n_in), n_in // LONG
    rows, law = quantise(x, layout), quantise_in_torch(x, long=True)
    assert rows.shape == (12, layout.row_bytes(n))
    integers = section(rows, 0, layout.integers_step * n, torch.int16 if words else torch.int8)
    assert torch.equal(integers.view(12, n, LONG).long(), law.integers)
    sums = section(rows, layout.sums(n), n * layout.sums_step, torch.int16)
    assert torch.equal(sums.view(12, n, 16).long(), law.integers.unflatten(-1, (16, -1)).sum(-1))
    scales = section(rows, layout.scales(n), n * layout.scales_step, torch.float32)
    assert equal(scales, law.scales)


def test_rows_need_not_be_neighbours() -> None:
    x = torch.randn(3, 7, 2, 320)
    layout = Layout(False)
    for view in (x[:, 1:, 0], x.transpose(0, 1)[..., :288], x[1, 2, 1]):
        found = quantise(view, layout)
        assert torch.equal(found, quantise(view.contiguous(), layout))
