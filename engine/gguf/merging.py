"""Byte-pair merging: from the characters of a piece of text to the ids of its tokens."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_CACHED_LENGTH = 64  # characters of a piece; words repeat, long runs of something rarely do
_CACHED_PIECES = 1 << 16


class Merger:
    """Joins neighbours by rank, the lowest first and the leftmost of equals.

    ids: id of every token's text. ranks: of "left right", two texts with a space between them.
    Every character of a piece and every joined text has to be a token.
    """

    def __init__(self, ids: dict[str, int], ranks: dict[str, int]) -> None:
        self._ids = ids
        self._ranks = ranks
        self._known: dict[str, list[int]] = {}

    def encode(self, piece: str) -> list[int]:
        """The ids of a piece that no merge may leave; time grows as n log n."""
        found = self._known.get(piece)
        if found is None:
            found = [self._ids[part] for part in self._merge(list(piece)) if part]
            if len(piece) <= _CACHED_LENGTH:
                if len(self._known) >= _CACHED_PIECES:
                    self._known.clear()
                self._known[piece] = found
        return found

    def _merge(self, parts: list[str]) -> list[str]:
        """The parts as merged; one that was joined to its left neighbour is left empty."""
        rank_of, n = self._ranks.get, len(parts)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        waiting = []
        for left in range(n - 1):
            rank = rank_of(f"{parts[left]} {parts[left + 1]}")
            if rank is not None:
                waiting.append((rank, left))
        heapify(waiting)
        while waiting:
            rank, left = heappop(waiting)
            right = after[left]
            # a neighbour may have been joined to something else since this pair was noted
            if right == n or rank_of(f"{parts[left]} {parts[right]}") != rank:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
            for start in (before[left], left):
                if start >= 0 and after[start] < n:
                    new = rank_of(f"{parts[start]} {parts[after[start]]}")
                    if new is not None:
                        heappush(waiting, (new, start))
        return parts
