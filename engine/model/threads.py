"""How many threads a model is given on the processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from engine.model.info import ModelInfo

ALL = torch.get_num_threads()
"""Before anything has changed it: torch counts cores, and heeds OMP_NUM_THREADS."""
_times: dict[int, float] = {}


def threads_for(info: ModelInfo) -> int:
    """One for a small model, whose operations may end before a second thread has woken up; for any
    other as many as torch has found to be useful on this machine."""
    return 1 if info.is_small else ALL


def use_threads(
    n_threads: int | None, info: ModelInfo, times: Mapping[int, float] | None = None
) -> None:
    """Have torch, and kernels with it, use this many threads from here on; None = `threads_for`.

    times: seconds of a pass by number of threads, if they were chosen by them
    (engine.thread_trial).
    """
    _times.clear()
    _times.update(times or {})
    torch.set_num_threads(n_threads or threads_for(info))


def chosen_by() -> str:
    """The number of threads in use and what it was chosen by, if that was measured; else ""."""
    n = torch.get_num_threads()
    if n not in _times:
        return ""
    parts = (f"{1000 * seconds:.2f} with {n}" for n, seconds in sorted(_times.items()))
    return f"{n}, chosen by measurement (ms a token: {', '.join(parts)})"


@contextmanager
def all_threads() -> Iterator[None]:
    """Within the context all of them, as loading any model can use; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    try:
        yield
    finally:
        torch.set_num_threads(before)
