"""The buffer of quantised rows against kernels.linear.block_parts."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.block_parts import LONG, SHORT
from kernels.linear.block_parts import quantise as quantise_in_torch
from kernels.linear.integer_blocks.activations_with_llvm import FORMS, STRETCH, Layout, quantise

IN_ORDER = FORMS["Q8_0"].lanes
SHORT_LAYOUTS = [
    Layout(False, IN_ORDER),
    Layout(False, IN_ORDER, minimums=True, together=3),
    Layout(False, IN_ORDER, words=True, together=4, offset=8),
    Layout(False, IN_ORDER, minimums=True, together=3, stretches=2),
]
LONG_LAYOUTS = [
    Layout(True, FORMS["Q6_K"].lanes, offset=32),
    Layout(True, FORMS["Q4_K"].lanes, together=4, minimums=True),
    Layout(True, FORMS["IQ4_XS"].lanes, words=True, together=2),
    Layout(True, FORMS["Q6_K"].lanes, offset=32, together=4, stretches=2),
]


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


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(12345.0, 1e30), expected.nan_to_num(12345.0, 1e30))


class Records:
    """Rows read from a buffer, as the layout says in words and not by its offsets: its parts one
    after the other, in each of them the rows that stand together, of each its stretches."""

    def __init__(self, buffer: torch.Tensor, layout: Layout, n_stretches: int) -> None:
        self.layout, self._n_stretches = layout, n_stretches
        n_records = -(-n_stretches // layout.stretches)
        self._rest = buffer.view(len(buffer), n_records, layout.record_bytes)

    def lines(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, stretches, n, numbers of 32 bytes]"""
        return self._taken(n, 32, dtype)

    def numbers(self) -> torch.Tensor:
        """f32 [rows, stretches]"""
        return self._taken(1, 4, torch.float32)[..., 0, 0]

    def integers(self) -> torch.Tensor:
        """[rows, stretches, 256], in their order."""
        if self.layout.words:
            pairs = self.lines(16, torch.int16).unflatten(-1, (8, 2)).unflatten(-3, (8, 2))
            fours = pairs.movedim(-3, -1).flatten(-2)
        else:
            fours = self.lines(8, torch.int8).unflatten(-1, (8, 4))
        lanes, n_sides = torch.tensor(self.layout.lanes), len(self.layout.lanes) // 8
        by_lane = fours.unflatten(-3, (n_sides, -1)).movedim(-3, -2).flatten(-2).flatten(-3, -2)
        return by_lane[..., lanes.argsort(), :].flatten(-2).long()

    def _taken(self, n: int, n_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        together, side = self.layout.together, self.layout.stretches
        size = n * together * side * n_bytes
        part, self._rest = self._rest[..., :size], self._rest[..., size:]
        part = part.unflatten(-1, (n, together, side, n_bytes)).movedim((3, 4), (1, 3))
        rows = part.flatten(2, 3).flatten(0, 1)[:, : self._n_stretches]
        return rows.contiguous().view(dtype)


@pytest.mark.parametrize("layout", SHORT_LAYOUTS)
@pytest.mark.parametrize("n_in", [32, 288, 1024])
def test_short_rows(n_in: int, layout: Layout) -> None:
    x, n = hard_rows(n_in), -(-n_in // STRETCH)
    rows, law = Records(quantise(x, layout), layout, n), quantise_in_torch(x, long=False)
    filling = (0, n * STRETCH // SHORT - n_in // SHORT)
    pad = torch.nn.functional.pad
    integers = pad(law.integers, (0, 0, *filling))
    assert torch.equal(rows.integers().view(integers.shape), integers)
    if layout.offset:
        sums = rows.lines(1, torch.int32).flatten(1)
        assert torch.equal(sums, -layout.offset * integers.sum(-1))
    if layout.minimums:
        assert law.sums is not None
        assert equal(rows.lines(1, torch.float32).flatten(1), pad(law.sums, filling))
    assert equal(rows.lines(1, torch.float32).flatten(1), pad(law.scales, filling))


@pytest.mark.parametrize("layout", LONG_LAYOUTS)
@pytest.mark.parametrize("n_in", [256, 768, 1024])
def test_long_rows(n_in: int, layout: Layout) -> None:
    x, n = hard_rows(n_in), n_in // LONG
    rows, law = Records(quantise(x, layout), layout, n), quantise_in_torch(x, long=True)
    assert torch.equal(rows.integers(), law.integers)
    if layout.offset or layout.minimums:
        sums = rows.lines(1, torch.int16).view(12, n, 16)
        assert torch.equal(sums.long(), law.integers.unflatten(-1, (16, -1)).sum(-1))
    assert equal(rows.numbers(), law.scales)


def test_rows_need_not_be_neighbours() -> None:
    x = torch.randn(3, 7, 2, 320)
    layout = SHORT_LAYOUTS[0]
    for view in (x[:, 1:, 0], x.transpose(0, 1)[..., :288], x[1, 2, 1]):
        n = -(-view.shape[-1] // STRETCH)
        found, expected = (
            Records(quantise(rows, layout), layout, n).integers()
            for rows in (view, view.contiguous())
        )
        assert torch.equal(found, expected)
