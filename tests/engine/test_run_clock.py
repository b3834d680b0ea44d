"""The clock of a run stands while a kernel is compiled, and goes on behind it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, sleep

import pytest

from engine.run_clock import run_clock
from kernels.dispatch import uses_llvm
from kernels.llvm.code import Code
from kernels.llvm.program import Program
from kernels.llvm.values import Value

SECONDS = 0.3


def _slow_to_compile(_code: Code, _args: Sequence[Value], _first: Value, _last: Value) -> None:
    sleep(SECONDS)


@pytest.mark.skipif(not uses_llvm(), reason="kernels are not compiled here")
def test_compiling_takes_no_time_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_KERNEL_CACHE", "off")
    wall, clock = perf_counter(), run_clock()
    Program(_slow_to_compile, 0)
    passed, told = perf_counter() - wall, run_clock() - clock
    assert passed >= SECONDS and told < passed - SECONDS


def test_everything_else_does() -> None:
    wall, clock = perf_counter(), run_clock()
    sleep(0.05)
    assert 0.05 <= run_clock() - clock <= perf_counter() - wall
