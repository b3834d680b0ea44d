"""The clock of a run: it stands while kernels are compiled."""

from __future__ import annotations

from time import perf_counter

from kernels.llvm.program import building_seconds


def run_clock() -> float:
    """Seconds, of which only differences mean anything, and only within one thread.

    A kernel is compiled when it is first called, once on a machine for each shape. In the rounds
    that wait for it that would be a hundred times their own duration, and a first run would be
    slower than a second one of the same prompt, so it is in no figure of a run.
    """
    return perf_counter() - building_seconds()
