"""A kernel call to measure, its median time, and the best rates of the device: copies, products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

KernelCall = Callable[[], object]
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One measurement. n_steps: turns of the naive version's Python loops, 1 if it has none.

    rate: the matrix rate that bounds it, "f32" or "bf16". fla: the same work in fla-core,
    where that is installed.
    """

    name: str
    shape: str
    run: KernelCall
    naive: KernelCall
    n_bytes: int
    n_operations: int
    n_steps: int = 1
    rate: str = "f32"
    fla: KernelCall | None = None


def seconds(run: Callable[[], object], evict: torch.Tensor, repeats: int) -> float:
    """The median time of `repeats` calls after a warm-up; on a GPU by its own clock.

    evict: a tensor on the device that measures, written before each call so that the call finds
    none of its inputs in a cache, as in a model that is larger than the caches. On a GPU the
    writing also covers the time in which the host starts the call.
    """
    for _ in range(WARM_UP):
        run()
    return median(_once(run, evict) for _ in range(repeats))


def _once(run: Callable[[], object], evict: torch.Tensor) -> float:
    evict.zero_()
    if evict.is_cuda:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1000
    before = perf_counter()
    run()
    return perf_counter() - before


def copy_rate(evict: torch.Tensor, n_bytes: int, repeats: int) -> float:
    """Bytes per second of a copy of n_bytes, reading and writing both counted."""
    source = torch.zeros(n_bytes // 4, device=evict.device)
    target = torch.zeros_like(source)
    return 2 * n_bytes / seconds(lambda: target.copy_(source), evict, repeats)


def matrix_rate(evict: torch.Tensor, side: int, dtype: torch.dtype, repeats: int) -> float:
    """Operations per second of a square product, a multiplication and an addition each one."""
    a = torch.ones(side, side, device=evict.device, dtype=dtype)
    b = torch.ones_like(a)
    return 2 * side**3 / seconds(lambda: a @ b, evict, repeats)
