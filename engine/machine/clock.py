"""The clock of a run, paused while kernels are compiled and while a run is inspected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from kernels.llvm.program import building, n_building


def run_clock() -> float:
    """Seconds, of which only differences within one thread are meaningful.

    A kernel is compiled on its first call, once per machine and shape. In the rounds that wait for
    it this would be a hundred times their own duration, and a first run would be slower than a
    second one of the same prompt, so it is excluded from all figures of a run.
    """
    return perf_counter() - building.seconds - _paused.seconds


def is_compiling() -> bool:
    """Whether any thread is compiling a kernel."""
    return n_building() > 0


@contextmanager
def clock_paused() -> Iterator[None]:
    """Exclude this thread's work within the context from all figures of a run."""
    since = run_clock()
    try:
        yield
    finally:
        _paused.seconds += run_clock() - since


def put_off(seconds: float) -> None:
    """Defer counting of work done ahead; a negative number counts it now."""
    _paused.seconds += seconds


class _Paused(threading.local):
    seconds = 0.0


_paused = _Paused()
