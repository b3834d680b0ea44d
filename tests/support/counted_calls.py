"""How much work a piece of Python does: calls, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class CallCount:
    """Calls of this thread, of Python's functions and of C's."""

    n = 0

    def _see(self, _frame: FrameType, event: str, _what: Any) -> None:
        if event in ("call", "c_call"):
            self.n += 1


@contextmanager
def counted_calls() -> Iterator[CallCount]:
    """Count while the block runs."""
    count, before = CallCount(), sys.getprofile()
    sys.setprofile(count._see)
    try:
        yield count
    finally:
        sys.setprofile(before)


def calls_of(work: Callable[[], object]) -> int:
    """Calls of a piece of work."""
    with counted_calls() as count:
        work()
    return count.n
