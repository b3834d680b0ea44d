"""Computations on the processor as tables of launches: what is recorded, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine.machine.graphs import RecordOnProcessor
from kernels.attention.compressed_choice import BlockScores, see_blocks_naive, see_blocks_with_llvm
from kernels.norm import rms_norm
from kernels.pointwise import add
from kernels.rows import take_rows


def compute(table: torch.Tensor, numbers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = take_rows(table, numbers).view(2, -1)
    halves = rows.split(rows.shape[1] // 2, 1)
    return rms_norm(add(*halves), weight, 1e-6).reshape(-1)


@torch.inference_mode()
def test_it_computes_what_was_recorded_of_the_numbers_that_are_there_now():
    table, numbers, weight = torch.randn(9, 8), torch.tensor([[0, 1], [2, 3]]), torch.randn(8)
    untouched = table.clone()
    outputs, replay = RecordOnProcessor()(lambda: (compute(table, numbers, weight),))
    for new in ([[0, 1], [2, 3]], [[8, 8], [4, 7]]):
        numbers.copy_(torch.tensor(new))
        replay()
        assert torch.equal(outputs[0], compute(table, numbers, weight))
        table.mul_(2)
    assert torch.equal(table, untouched * 4)


@torch.inference_mode()
def test_a_choice_of_blocks_takes_columns_of_a_wider_product() -> None:
    torch.manual_seed(1)
    seen, positions = torch.ones(2, 3, 40, dtype=torch.bool), torch.arange(40).repeat(2, 1)
    product, keys = torch.randn(2, 3, 5 * 20 + 5 + 7), torch.randn(2, 40, 25)[..., 2:22]
    q, weights = product[..., :100].unflatten(-1, (5, 20)), product[..., 100:105]
    given = seen, seen, positions, 4, BlockScores(q, weights, keys, 3)
    (visible,), replay = RecordOnProcessor()(lambda: (see_blocks_with_llvm(*given),))
    replay()
    assert torch.equal(visible, see_blocks_naive(*given))


def test_recordings_take_turns_in_one_memory():
    record, x = RecordOnProcessor(), torch.randn(3, 300)
    (sums,), add_up = record(lambda: (add(add(x, x), x),))
    n_bytes = record.n_bytes
    (normed,), norm = record(lambda: (rms_norm(add(x, x), x[0], 1e-6),))
    assert record.n_bytes == n_bytes
    for _ in range(2):
        add_up()
        assert torch.equal(sums, x + x + x)
        norm()
        assert torch.equal(normed, rms_norm(x + x, x[0], 1e-6))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(-1),
        lambda x: x.fill_(0.0),
        lambda x: x[torch.tensor([0])],
        lambda x: x.new_zeros(3),
        lambda x: torch.tensor([1.0]),
        lambda x: torch.empty(0, 3).sum(),
        lambda x: x[0, 0].item(),
    ],
)
@torch.inference_mode()
def test_what_no_kernel_does_is_refused_and_nothing_is_changed(operation):
    x = torch.randn(4, 3)
    before, target = x.clone(), torch.zeros(4, 3)

    def writes_and_computes() -> tuple[torch.Tensor]:
        target_rows = add(x, x)
        return (add(target_rows, target), operation(x))[:1]

    with pytest.raises(NotImplementedError, match="is not a kernel"):
        RecordOnProcessor()(writes_and_computes)
    assert torch.equal(x, before)
    assert torch.equal(add(x, x), x + x), "outside of a recording, programs run"


def test_recording_leaves_torchs_compiler_alone():
    """Which would take a second to import in front of the second token."""
    code = """
import sys, torch
from engine.machine.graphs import RecordOnProcessor
RecordOnProcessor()(lambda: (torch.empty(2, 3).view(6),))
print(sorted(name for name in sys.modules if name.startswith("torch._dynamo")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
