"""The clock of a run: it stops while kernels are compiled and while a run is looked at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from kernels.llvm.program import building, n_building


def run_clock() -> float:
    """Seconds, of which only differences mean anything, and only within one thread.

    A kernel is compiled when it is first called, once on a machine for each shape. In the rounds
    that wait for it that would be a hundred times their own duration, and a first run would be
    slower than a second one of the same prompt, so it is in no figure of a run.
    """
    return perf_counter() - building.seconds - _paused.seconds


def is_compiling() -> bool:
    """Whether any thread compiles a kernel now."""
    return n_building() > 0


@contextmanager
def clock_paused() -> Iterator[None]:
    """What this thread does meanwhile is in no figure of a run."""
    since = run_clock()
    try:
        yield
    finally:
        _paused.seconds += run_clock() - since


def put_off(seconds: float) -> None:
    """What this thread has just done for later does not count yet; less than 0: it does now."""
    _paused.seconds += seconds


class _Paused(threading.local):
    seconds = 0.0


_paused = _Paused()
