"""Counts of what followed an n-gram, and which token they speak for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

N_LONGEST = 4
"""Longest n-gram of a context or dynamic table."""

N_STATIC = 2
"""Length of the n-grams of a static table."""

Counts = dict[int, int]
"""Token -> how often it followed."""

Find = Callable[[tuple[int, ...]], Counts | None]
"""What a table knows of an n-gram."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Least evidence by length of the n-gram, from 1: observations, percent of the best token."""

    samples: tuple[int, ...]
    percent: tuple[int, ...]

    def holds(self, length: int, best: int, total: int) -> bool:
        """Whether `best` of `total` observations after an n-gram of this length are enough."""
        return total >= self.samples[length - 1] and 100 * best >= self.percent[length - 1] * total


LAX = Floor((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = Floor((4, 3, 2, 2), (75, 66, 66, 66))


def learn(table: dict[tuple[int, ...], Counts], tokens: Sequence[int]) -> None:
    """Count every n-gram of 1..4 tokens that has a successor within `tokens`."""
    for n in range(1, N_LONGEST + 1):
        for end in range(n, len(tokens)):
            counts = table.setdefault(tuple(tokens[end - n : end]), {})
            counts[tokens[end]] = counts.get(tokens[end], 0) + 1


def most_likely(find: Find, tail: Sequence[int], static: Counts, floor: Floor) -> int | None:
    """The next token by the longest n-gram at the end of `tail` with enough evidence.

    Among the tokens behind an n-gram the largest count wins, times 100 for each time that the
    static table saw the token behind the last two.
    """
    for n in range(min(N_LONGEST, len(tail)), 0, -1):
        counts = find(tuple(tail[-n:]))
        if not counts:
            continue
        best = max(counts, key=lambda token: counts[token] * (100 * static.get(token, 0) or 1))
        if floor.holds(n, counts[best], sum(counts.values())):
            return best
    return None


def most_frequent(counts: Counts) -> int | None:
    """The next token by the static table alone."""
    if not counts:
        return None
    best = max(counts, key=counts.__getitem__)
    return best if LAX.holds(N_STATIC, counts[best], sum(counts.values())) else None
