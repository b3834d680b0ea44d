"""Pearson's chi-square test against a known distribution."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch


def chi_square(outcomes: Iterable[Hashable], expected: Mapping[Hashable, float]) -> float:
    """How likely a deviation at least this large is if outcomes follow `expected`.

    0 if something happened that cannot. Outcomes expected fewer than five times share a cell.
    """
    counts = dict.fromkeys(expected, 0)
    n = 0
    for outcome in outcomes:
        if expected.get(outcome, 0.0) <= 0.0:
            return 0.0
        counts[outcome] += 1
        n += 1
    cells, rare = [], [0, 0.0]
    for outcome, p in expected.items():
        if n * p < 5:
            rare = [rare[0] + counts[outcome], rare[1] + n * p]
        else:
            cells.append([counts[outcome], n * p])
    if rare[1] > 0:
        cells.append(rare)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
