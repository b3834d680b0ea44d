"""Garbage collection, held back while objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_wait() -> Iterator[None]:
    """Within the context nothing looks for cycles, which among a hundred thousand objects that are
    all in use takes a sixth of an import's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # what was made stays: the next collection would look at all of it
            gc.enable()
