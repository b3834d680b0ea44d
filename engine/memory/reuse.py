"""Memories of runs that have ended, kept for later runs of the same session.

Recorded passes (engine.machine.graphs) are bound to the storage that they were recorded with, and
to record them takes as long as dozens of steps. In the same storage, the next run finds them done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock

from engine.memory.hybrid import HybridMemory

MakeMemory = Callable[[], HybridMemory]

MOST_MEMORIES = 32
MOST_BYTES = 256 << 20
"""Of all memories that a shelf keeps, their recordings included."""


class MemoryShelf:
    """Memories no one uses, under keys that are equal where one can stand in for the other.

    The oldest make room when there are more than MOST_MEMORIES, or MOST_BYTES. Runs in several
    threads may share a shelf.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Hashable, HybridMemory]] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Hashable, make: MakeMemory) -> HybridMemory:
        """A memory as `make` makes it, for the caller alone; the newest one kept under the key."""
        with self._lock:
            places = [i for i, (its_key, _) in enumerate(self._kept) if its_key == key]
            memory = self._kept.pop(places[-1])[1] if places else None
        return memory if memory and memory.renew() else make()

    def put(self, key: Hashable, memory: HybridMemory) -> None:
        """Keep a memory that no one will use any more, if a later run would gain by it."""
        if not memory.is_recorded:
            return
        with self._lock:
            self._kept.append((key, memory))
            while len(self._kept) > MOST_MEMORIES or self._n_bytes() > MOST_BYTES:
                del self._kept[0]

    def _n_bytes(self) -> int:
        return sum(memory.n_held_bytes() for _, memory in self._kept)


class LentMemories:
    """What one run takes from a shelf, or makes for itself alone where there is none."""

    def __init__(self, shelf: MemoryShelf | None = None) -> None:
        self._shelf = shelf
        self._lent: list[tuple[Hashable, HybridMemory]] = []

    def take(self, key: Hashable, make: MakeMemory) -> HybridMemory:
        """See MemoryShelf."""
        if self._shelf is None:
            return make()
        memory = self._shelf.take(key, make)
        self._lent.append((key, memory))
        return memory

    def give_back(self) -> None:
        """The run has ended and is in order: leave its memories to the next one."""
        if self._shelf is not None:
            for key, memory in self._lent:
                self._shelf.put(key, memory)
        self._lent = []
