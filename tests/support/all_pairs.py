"""Rows in which any two values of different columns meet, far fewer than their product."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same rows in every process; about as many as the two longest columns have pairs."""
    places = list(product(*(range(len(column)) for column in columns)))
    return [
        tuple(column[place] for column, place in zip(columns, places[row], strict=True))
        for row in rows_of_all_pairs(places)
    ]


def rows_of_all_pairs(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The places of some rows, of two columns or more, with every pair of values that a row has."""
    pairs = [frozenset(combinations(enumerate(row), 2)) for row in rows]
    missing = set[Any]().union(*pairs)
    # far apart, as neighbours share most of their values
    left = sorted(range(len(rows)), key=lambda row: (row * 0.6180339887) % 1)
    chosen: list[int] = []
    for n_new in range(max(map(len, pairs), default=0), 0, -1):
        for row in left:
            if len(pairs[row] & missing) == n_new:
                chosen.append(row)
                missing -= pairs[row]
        left = [row for row in left if pairs[row] & missing]
    return sorted(chosen)
