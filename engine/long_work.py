"""Long pieces of work: how far they are, whatever listens, and garbage collection
held back meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.errors import Cancelled

_T = TypeVar("_T")

ReportProgress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do (bytes or rows, in one unit), and what is being
done, such as "dequantising blk.12"."""


def report_part(progress: ReportProgress | None, start: int, total: int) -> ReportProgress | None:
    """Reports of one part of the work as reports of all of it.

    start: what was done before this part. total: what there is to do in all parts.
    """
    if progress is None:
        return None
    return lambda done, _, phase: progress(start + done, total, phase)


def watched(parts: Iterable[_T], cancelled: Callable[[], bool] | None) -> Iterator[_T]:
    """Parts of the work. Raises Cancelled in place of the next one when `cancelled` turns true."""
    for part in parts:
        if cancelled is not None and cancelled():
            raise Cancelled
        yield part


WAITING: list[None] = []
"""An element for each `collections_wait` on any thread; code that collects by itself checks it."""


@contextmanager
def collections_wait() -> Iterator[None]:
    """Within the context nothing looks for cycles, which among a hundred thousand objects that are
    all in use takes a sixth of an import's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    WAITING.append(None)
    try:
        yield
    finally:
        WAITING.pop()
        if was_enabled:
            gc.freeze()  # what was made stays: the next collection would look at all of it
            gc.enable()
