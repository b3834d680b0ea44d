"""A clock that stands while everything is stopped, which a wall clock does not.

It is one for a process and all that it forks: whoever awaits something looks at it often, and no
look counts more than a second since the one before. So a limit outlasts signals that stop the
processes for minutes, a machine that sleeps, and a debugger.
"""

from __future__ import annotations

import mmap
import struct
import time

LOOK_S = 0.1
"""How often whoever waits should look."""
_MOST_S = 1.0
_TIMES = struct.Struct("dd")
_page = mmap.mmap(-1, mmap.PAGESIZE)
"""Shared with what is forked: when somebody last looked, and the time on the clock."""


def now() -> float:
    """Seconds since some time or other."""
    looked, at = _TIMES.unpack_from(_page)
    this = time.monotonic()
    at += min(max(0.0, this - looked), _MOST_S)
    _TIMES.pack_into(_page, 0, this, at)
    return at
