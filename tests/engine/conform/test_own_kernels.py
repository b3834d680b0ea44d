"""Our kernels on the processor go through the door that others' go through."""

from __future__ import annotations

import pytest

from engine.conform.adapters import own
from tests.support.own_kernels import faults, kernels


# an operation that has moved is missing in all backends: each name stays in one of them
@pytest.mark.parametrize(("name", "backend", "recurrence"), kernels("naive", "torch", "llvm"))
@pytest.mark.thinned(8)
def test_they_pass(name, backend, recurrence):
    assert not faults(f"{name}.{backend}", recurrence)


def test_all_backends_are_there():
    names = {kernel.name.rpartition(".")[2] for kernel in own.ENGINE.kernels}
    assert names >= {"naive", "torch"}
