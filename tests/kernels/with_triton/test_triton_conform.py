"""Our recurrences in Triton go through the door that others' go through."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.conform import runner
from engine.conform.interpreter_with_triton import mend, watched
from kernels.recurrence.delta_rule import with_triton as delta_rule
from kernels.recurrence.ssd import with_triton as ssd
from tests.support.own_kernels import faults, kernels


@pytest.mark.parametrize(("name", "backend", "recurrence"), kernels("triton"))
@pytest.mark.thinned(4)
def test_they_pass(device, monkeypatch, name, backend, recurrence):
    name = f"{name}.{backend}"
    if device == "cpu":  # the interpreter pays for each program: there one holds a whole state
        for module, width in ((delta_rule, "NARROW"), (delta_rule, "WIDE"), (ssd, "ROWS")):
            monkeypatch.setattr(module, width, 128)
        monkeypatch.setattr(ssd, "CHUNK_ROWS", 32)
        # it computes in one order, always; rows among others have tests of each kernel
        assert not faults(name, recurrence, n_shapes=1, without=["repeat", "batch"])
    else:
        assert not faults(name, recurrence, device)


@triton.jit
def _fill(rows, where, n: tl.constexpr):
    tl.store(rows[1] + tl.load(where) + tl.arange(0, n), 1.0)


@pytest.mark.parametrize("where", [0, 4, 5, 1 << 20, -1])
def test_a_write_outside_of_all_tensors_ends_the_kernel(device, where):
    if device != "cpu":
        pytest.skip("the interpreter alone looks")
    rows = torch.zeros(8), torch.zeros(8)
    if 0 <= where <= 4:
        _fill[(1,)](rows, torch.tensor([where]), 4)
        assert rows[1].sum() == 4
    else:
        with pytest.raises(Exception, match=r"written \d+ bytes (before|after the end of) "):
            _fill[(1,)](rows, torch.tensor([where]), 4)


@triton.jit
def _logs(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.log(1.0 - tl.load(x + at)))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([0.5, 3.0], "log of -2 (test_triton_conform.py, line "),
        ([0.5, torch.nan], "x[1] of [2] is read (test_triton_conform.py, line "),
        ([0.5, 0.25], None),
    ],
)
def test_what_is_no_number_is_traced_to_where_it_is_first_read_or_made(device, x, words):
    if device != "cpu":
        pytest.skip("the interpreter alone looks")
    mend()
    with np.errstate(invalid="ignore"), watched() as places:
        _logs[(1,)](torch.tensor(x), torch.empty(2), 2)
    assert [place.startswith(words) for place in places] == [True] * (words is not None)


OUTSIDE = """
import torch
import triton
import triton.language as tl
from triton.language import exp

@triton.jit
def _add(x, out, n: tl.constexpr):
    tl.store(out + 8 * n + tl.arange(0, n), exp(tl.load(x + tl.arange(0, n))))

def adapter(shape, memory):
    _add[(1,)](torch.zeros(4), torch.zeros(4), 4)
adapter.recurrences = "conv"
"""


def test_the_kernel_of_a_user_may_not_write_elsewhere(device, tmp_path):
    if device != "cpu":
        pytest.skip("the interpreter alone looks")
    (tmp_path / "mine.py").write_text(OUTSIDE)
    (seen,) = runner.run(
        "", f"{tmp_path}/mine.py:adapter", seed=1, device="cpu", checks=["depths"]
    )  # fmt: skip
    assert [fault.cause for fault in seen.faults] == ["padding-written"]
