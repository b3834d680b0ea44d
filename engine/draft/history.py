"""The tokens of one sequence, searchable for n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

_SIZE = array("i").itemsize


class History:
    """Token ids in order. A search is a search for bytes: fast, and without an index to keep."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._bytes = bytearray(self._tokens.tobytes())

    def __len__(self) -> int:
        return len(self._tokens)

    def write(self, pos0: int, tokens: Sequence[int]) -> None:
        """Put tokens at pos0, which is at most the length; what was there and behind is lost."""
        added = array("i", tokens)
        del self._tokens[pos0:]
        del self._bytes[pos0 * _SIZE :]
        self._tokens.extend(added)
        self._bytes.extend(added.tobytes())

    def part(self, start: int, stop: int | None = None) -> list[int]:
        """Tokens start..stop; a negative start counts from the end."""
        return self._tokens[start:stop].tolist()

    def holds(self, ngram: Sequence[int], start: int) -> bool:
        """Whether the n-gram stands at `start`."""
        return self.part(start, start + len(ngram)) == list(ngram)

    def find_last(self, ngram: Sequence[int], low: int, high: int) -> int:
        """The largest start in low..high where the n-gram stands, -1 if there is none."""
        pattern = array("i", ngram).tobytes()
        end = (high + len(ngram)) * _SIZE
        while high >= low:
            at = self._bytes.rfind(pattern, low * _SIZE, end)
            if at < 0:
                return -1
            if at % _SIZE == 0:
                return at // _SIZE
            end = at + len(pattern) - 1  # a match across token borders is none
        return -1

    def find_all(self, ngram: Sequence[int], low: int, high: int) -> Iterator[int]:
        """All starts in low..high where the n-gram stands, ascending; they may overlap."""
        pattern = array("i", ngram).tobytes()
        # not below zero, which would count from the end
        end = max(high + len(ngram), 0) * _SIZE
        at = low * _SIZE - 1
        while (at := self._bytes.find(pattern, at + 1, end)) >= 0:
            if at % _SIZE == 0:
                yield at // _SIZE
