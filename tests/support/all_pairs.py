"""Rows in which any two values of different columns meet, far fewer than their product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The same rows in every process; about as many as the two longest columns have pairs."""
    missing = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(columns)), 2)
        for a, b in product(range(len(columns[i])), range(len(columns[j])))
    }
    rows: list[tuple[Any, ...]] = []
    while missing:
        row = dict(min(missing))
        for i, values in enumerate(columns):
            if i not in row:
                # where values are as good as one another, by turns
                order = [(len(rows) + a) % len(values) for a in range(len(values))]
                row[i] = max(order, key=lambda a: len(missing & _pairs({**row, i: a})))
        missing -= _pairs(row)
        rows.append(tuple(values[row[i]] for i, values in enumerate(columns)))
    return rows


def _pairs(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(sorted(row.items()), 2))
