"""Rows by number, copies, joined columns; cells: against PyTorch's own indexing."""

from __future__ import annotations

import pytest
import torch

from kernels import rows
from kernels.rows import cells
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(rows, "naive", "with_llvm", "with_torch")

cells_law, cells_llvm, cells_torch = implementations(cells, "naive", "with_llvm", "with_torch")

ROWS = pytest.mark.parametrize(
    "ops", [naive, with_torch, with_llvm, rows], ids=["naive", "torch", "llvm", "op"]
)


@ROWS
@pytest.mark.parametrize("shape", [(1,), (40,), (3, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_rows_are_taken_and_put(ops, shape, dtype):
    wide = torch.randint(0, 99, (9, 2, *shape)).to(dtype)
    table, numbers = wide[:, 0], torch.tensor([[4, 0], [8, 5]])
    taken = ops.take_rows(table, numbers)
    assert torch.equal(taken, table[numbers])
    before = wide.clone()
    ops.put_rows(table, numbers, taken + 1)
    before[numbers.flatten(), 0] += 1
    assert torch.equal(wide, before), "other rows and what lies between them stay"


@ROWS
@pytest.mark.parametrize("width", [1, 16, 48])
def test_rows_are_taken_from_panels(ops, width):
    table = torch.randint(-(2**31), 2**31 - 1, (96, 37), dtype=torch.int32)
    panels = table.view(-1, width, 37).transpose(1, 2).contiguous()
    numbers = torch.tensor([[95, 0], [17, 48]])
    assert torch.equal(ops.take_columns(panels, numbers), table[numbers])


@ROWS
def test_no_row_at_all(ops):
    table = torch.randn(3, 5)
    assert ops.take_rows(table, torch.zeros(0, dtype=torch.int64)).shape == (0, 5)


@ROWS
@pytest.mark.parametrize("d", [1, 16, 37])
def test_copies_and_joined_columns(ops, d):
    source = torch.randn(2, 3, 5, 2 * d)[..., d:]
    wide = torch.full((2, 4, 5, d), 7.0)
    ops.copy_rows(wide[:, 1:], source)
    assert torch.equal(wide[:, 1:], source)
    assert bool((wide[:, :1] == 7.0).all())
    other = torch.randn(2, 3, 5, 3)
    assert torch.equal(ops.join((source, other)), torch.cat((source, other), -1))


@ROWS
def test_strides_that_no_two_steps_reach(ops):
    source = torch.randn(2, 3, 4, 5).permute(2, 0, 1, 3)
    target = torch.zeros(3, 4, 2, 5).permute(1, 2, 0, 3)
    ops.copy_rows(target, source)
    assert torch.equal(target, source)


def test_a_table_with_gaps_in_its_rows_takes_none():
    table = torch.zeros(4, 6)[:, ::2]
    with pytest.raises(ValueError, match="side by side"):
        with_llvm.put_rows(table, torch.tensor([1]), torch.ones(1, 3))


@pytest.mark.parametrize("ops", [cells_law, cells_torch, cells_llvm, cells])
def test_rows_go_to_their_cells(ops):
    storage, rows = torch.randn(3, 2, 7, 24), torch.randn(2, 2, 5, 24)[:, :, 3:]
    streams, where = torch.tensor([2, 2, 0, 0]), torch.tensor([6, 1, 0, 3])
    expected = storage.clone()
    for i in range(4):
        expected[streams[i], :, where[i]] = rows[i // 2, i % 2]
    ops.write_cells(storage, rows, streams, where)
    assert torch.equal(storage, expected)
