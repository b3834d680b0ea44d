"""A clock that is while everything is stopped, which a wall clock does not.

It is one for a process and all that it forks: anyone who awaits something looks at it often, and no
look counts more than a second since the one before. So a limit outlasts signals that stop the
processes for minutes, a machine that sleeps, and a debugger.
"""

from __future__ import annotations

import mmap
import time

LOOK_S = 0.1
"""How often anyone who waits should look."""
_MOST_S = 1.0
_times = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
"""Shared with what is forked: when a process last looked, and the time on the clock. Each is
written at once: struct's pack_into first writes zeros, which another process may read."""


def now() -> float:
    """Seconds since some time or other."""
    this = time.monotonic()
    at = _times[1] + min(max(0.0, this - _times[0]), _MOST_S)
    _times[0], _times[1] = this, at
    return at
