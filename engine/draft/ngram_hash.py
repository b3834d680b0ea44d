"""Where ngram-map finds an n-gram again: a hash table of first occurrences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.draft.history import History

N_SLOTS = 1 << 18
_FACTOR = 2654435761


class FirstOccurrences:
    """Start of the first n-gram that fell into each slot; 0 stands for an empty slot.

    last: positions up to here have been entered. Only the hash is kept: whoever looks up must
    compare the tokens.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._slots: dict[int, int] = {}
        self.last = 0

    def find(self, ngram: Sequence[int]) -> int:
        """Where an n-gram of the same slot starts, 0 = nowhere."""
        return self._slots.get(slot_of(ngram), 0)

    def enter(self, history: History, starts: Iterator[int]) -> None:
        """Add the n-grams at these starts; a slot in use keeps what it has."""
        for start in starts:
            self._slots.setdefault(slot_of(history.part(start, start + self._n)), start)

    def drop_from(self, length: int) -> None:
        """Forget what starts at or behind `length`."""
        self._slots = {slot: start for slot, start in self._slots.items() if start < length}
        self.last = min(self.last, max(0, length - 1))


def slot_of(ngram: Sequence[int]) -> int:
    """h = h * 2654435761 + token in 32 bits, modulo the number of slots."""
    value = 0
    for token in ngram:
        value = (value * _FACTOR + token) & 0xFFFFFFFF
    return value % N_SLOTS
