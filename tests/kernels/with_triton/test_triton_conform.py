"""Our recurrences in Triton go through the door that others' go through."""

from __future__ import annotations

import pytest

from kernels.recurrence.delta_rule import with_triton as delta_rule
from kernels.recurrence.ssd import with_triton as ssd
from tests.support.own_kernels import faults, kernels


@pytest.mark.parametrize(("name", "recurrence"), kernels("triton"))
def test_they_pass(device, monkeypatch, name, recurrence):
    if device == "cpu":  # the interpreter pays for each program: there one holds a whole state
        for module, width in ((delta_rule, "NARROW"), (delta_rule, "WIDE"), (ssd, "ROWS")):
            monkeypatch.setattr(module, width, 128)
        monkeypatch.setattr(ssd, "CHUNK_ROWS", 32)
    assert not faults(name, recurrence, device, n_shapes=1 if device == "cpu" else 4)
