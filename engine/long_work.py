"""Long work: its progress, its cancellation, and garbage collection postponed meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.errors import Cancelled

_T = TypeVar("_T")

ReportProgress = Callable[[int, int, str], None]
"""Called with the amount done, the total (bytes or rows, in one unit), and the current step, such
as "dequantising blk.12"."""


def report_part(progress: ReportProgress | None, start: int, total: int) -> ReportProgress | None:
    """Maps progress of one part of the work to progress of the whole.

    start: amount done before this part. total: of all parts.
    """
    if progress is None:
        return None
    return lambda done, _, phase: progress(start + done, total, phase)


def watched(parts: Iterable[_T], cancelled: Callable[[], bool] | None) -> Iterator[_T]:
    """Parts of the work. Raises Cancelled instead of the next one once `cancelled` returns True."""
    for part in parts:
        if cancelled is not None and cancelled():
            raise Cancelled
        yield part


WAITING: list[None] = []
"""An element for each `collections_wait` on any thread; code that collects by itself checks it."""


@contextmanager
def collections_wait() -> Iterator[None]:
    """Disables garbage collection within the context: with a hundred thousand live objects, looking
    for cycles takes a sixth of an import's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    WAITING.append(None)
    try:
        yield
    finally:
        WAITING.pop()
        if was_enabled:
            gc.freeze()  # the new objects stay: the next collection would visit all of them
            gc.enable()
