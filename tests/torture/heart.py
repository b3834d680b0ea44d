"""A heart that a process beats while its window has to answer, and a watch over it from outside.

What stops a whole process, such as a thread that keeps the interpreter's lock, stops its own clocks
and its own watchers as well. Time in which its threads were ready and had no CPU does not count,
nor time in which it was stopped, nor the time in which the watch itself was.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

BEAT_MS = 20
_MOST_S = 0.25
"""Of the time between two looks."""
_LOADED = 10
"""Threads that share a CPU, at most."""
_state = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
"""Shared with what is forked: beats so far, and how many wait for them."""


def beat() -> None:
    """To be called every BEAT_MS."""
    _state[0] += 1


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """From here to its end there are beats."""
    _wait(1)
    try:
        yield
    finally:
        _wait(-1)


def _wait(more: int) -> None:
    beat()
    _state[1] += more


def reset() -> None:
    """To be called before the process is forked that will beat; later it may have started."""
    _state[0] = _state[1] = 0


class Watch:
    """Looks at the heart of a forked process. stalled_s: the longest time without a beat."""

    def __init__(self, process: int) -> None:
        self._folder = Path(f"/proc/{process}")
        self._beats, self._passed, self._looked = 0, 0.0, time.monotonic()
        self._before = self._times()
        self.stalled_s = 0.0

    def look(self) -> None:
        """To be called every tenth of a second."""
        beats, waiting = _state[0], _state[1]
        now, times = time.monotonic(), self._times()
        if waiting and beats == self._beats and not self._is_stopped():
            self._passed += min(now - self._looked, _MOST_S)
            self.stalled_s = max(self.stalled_s, self._passed - self._excused(times))
        else:
            self._passed, self._before = 0.0, times
        self._beats, self._looked = beats, now

    def _excused(self, times: dict[str, tuple[float, float]]) -> float:
        """How long its threads have waited for a CPU since the latest beat, all together. One that
        only looks again and again whether it may go on waits as well, and hardly runs."""
        total = 0.0
        for thread, (ran, waited) in times.items():
            ran_before, waited_before = self._before.get(thread, (0.0, 0.0))
            total += min(waited - waited_before, _LOADED * (ran - ran_before))
        return total

    def _times(self) -> dict[str, tuple[float, float]]:
        """Seconds that each thread ran, and that it was ready and did not."""
        found = {}
        for path in self._folder.glob("task/*/schedstat"):
            with contextlib.suppress(OSError):
                ran, waited, _ = path.read_text().split()
                found[path.parent.name] = (int(ran) / 1e9, int(waited) / 1e9)
        return found

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return (self._folder / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return True
