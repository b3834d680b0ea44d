"""A copy of a file in memory of this process's own, which can be filled ahead in the background.

Reading a file takes the system as long as importing torch takes the interpreter, and needs no
interpreter: fresh memory is cleared, and where the machine is a virtual one, perhaps fetched.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

_HUGE = 2 << 20
_AT_ONCE = 16 << 20
"""Bytes read between two turns of the interpreter lock, for which the thread may wait 5 ms."""


class PrivateCopy:
    """memory: none of it in use yet, on huge pages where there are some: they take as long to fill,
    and products read them faster (engine.machine.host_memory)."""

    def __init__(self, n_bytes: int) -> None:
        """Raises OSError."""
        self._spans: Sequence[tuple[int, int]] = ()
        self._until, self._is_wanted, self._is_done = 0, True, True
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            self.memory = mmap.mmap(-1, n_bytes)
            return
        # Linux begins such memory at the start of a huge page
        n_bytes = -(-n_bytes // _HUGE) * _HUGE
        self.memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    def fill(self, file: int, spans: Sequence[tuple[int, int]]) -> None:
        """Begin to read these bytes of an open file, from and to, rising, to the same places."""
        if hasattr(os, "preadv"):
            self._spans, self._is_done = spans, False
            args = os.dup(file), memoryview(self.memory)
            self._thread = threading.Thread(target=self._fill, args=args, daemon=True)
            self._thread.start()

    def has(self, start: int, stop: int, seconds: float) -> bool | None:
        """Whether these bytes are there; None where that is not known within these seconds. What
        will never be, after an error too, is to be read by who wants it."""
        if not any(first <= start and stop <= last for first, last in self._spans):
            return False
        with self._moved:
            self._moved.wait_for(lambda: self._until >= stop or self._is_done, seconds)
            return self._until >= stop or (False if self._is_done else None)

    def stop(self) -> None:
        """Read no further."""
        self._is_wanted = False
        if self._thread is not None:
            self._thread.join()

    def _fill(self, file: int, into: memoryview) -> None:
        try:
            for start, stop in self._spans:
                self._until = start
                while self._until < stop:
                    step = into[self._until : min(self._until + _AT_ONCE, stop)]
                    n = os.preadv(file, [step], self._until) if self._is_wanted else 0
                    if not n:  # the file has become shorter
                        return
                    with self._moved:
                        self._until += n
                        self._moved.notify_all()
        except OSError:
            pass
        finally:
            os.close(file)
            with self._moved:
                self._is_done = True
                self._moved.notify_all()
