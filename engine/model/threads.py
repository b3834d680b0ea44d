"""How many threads a model is given on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.model.info import ModelInfo

# before anything has changed it: torch counts cores, and heeds OMP_NUM_THREADS
_ALL = torch.get_num_threads()


def threads_for(info: ModelInfo) -> int:
    """One for a small model, whose operations end before a second thread has woken up; for any
    other as many as torch has found to be useful on this machine."""
    return 1 if info.is_small else _ALL


def use_threads(n_threads: int | None, info: ModelInfo) -> None:
    """Have torch, and kernels with it, use this many threads from here on; None = `threads_for`."""
    torch.set_num_threads(n_threads or threads_for(info))


@contextmanager
def all_threads() -> Iterator[None]:
    """Within the context all of them, as loading any model can use; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(_ALL)
    try:
        yield
    finally:
        torch.set_num_threads(before)
