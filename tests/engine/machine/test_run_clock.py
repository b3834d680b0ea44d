"""The clock of a run is while a kernel is compiled, and goes on after it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import engine.machine.clock
import kernels.llvm.program
from engine.machine.clock import run_clock
from kernels.dispatch import uses_llvm
from kernels.llvm.code import Code
from kernels.llvm.program import Program
from kernels.llvm.values import Value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall's time, one number, which moves only where a test says so."""
    now = [100.0]
    for module in (engine.machine.clock, kernels.llvm.program):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


@pytest.mark.skipif(not uses_llvm(), reason="kernels are not compiled here")
def test_compiling_takes_no_time_of_a_run(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    def slow_to_compile(_code: Code, _args: Sequence[Value], _first: Value, _last: Value) -> None:
        clock[0] += 300.0

    monkeypatch.setenv("DRAFTSCOPE_KERNEL_CACHE", "off")
    begun = run_clock()
    Program(slow_to_compile, 0)
    clock[0] += 2.0
    assert run_clock() - begun == pytest.approx(2.0)


def test_everything_else_does(clock: list[float]) -> None:
    begun = run_clock()
    clock[0] += 0.5
    assert run_clock() - begun == pytest.approx(0.5)
