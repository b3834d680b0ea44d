"""How an indexer chooses."""

from __future__ import annotations

from typing import NamedTuple


class Indexer(NamedTuple):
    """ratio: tokens of a block. n_blocks: how many a query sees. eps: of the keys' norm."""

    ratio: int
    n_blocks: int
    eps: float
