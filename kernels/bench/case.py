"""One thing to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. n_steps: turns of the naive version's Python loops, 1 if it has none.

    rate: the matrix rate that bounds it, "f32" or "bf16". fla: the same work in fla-core,
    where that is installed.
    """

    name: str
    shape: str
    run: Run
    naive: Run
    n_bytes: int
    n_operations: int
    n_steps: int = 1
    rate: str = "f32"
    fla: Run | None = None
