"""What n-grams are hashed with."""

from __future__ import annotations

from typing import NamedTuple

LEAST = 1e-6
"""Below which the magnitude of a score is not told from it."""


class NgramHash(NamedTuple):
    """multipliers: a factor below 2^64 for each token, newest first, n of them. sizes, offsets: of
    the range of rows of each head; as many heads for every length from 2 to n, shorter ones first.
    end_id: the token that ends a text."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end_id: int

    @property
    def n_heads(self) -> int:
        """Of one length."""
        return len(self.sizes) // (len(self.multipliers) - 1)
