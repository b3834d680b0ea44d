"""The results of a sweep as rows of text: what varied, what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.experiments.sweep.results import SweepResults, setting_text

FIGURE_HEADS: Mapping[str, tuple[str, int]] = {
    "predicted_per_second": ("tokens/s", 1),
    "draft_acceptance_rate": ("acceptance", 3),
    "mean_acceptance_length": ("mean length", 2),
}
"""Figures in the table: their heads and digits."""

_LONGEST = 60


def result_table(results: SweepResults) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row per job in the plan's order; the error of a failed one is its last cell."""
    heads = ["job", *results.axes, *(head for head, _ in FIGURE_HEADS.values()), "result"]
    rows = []
    for i in range(results.n):
        settings = results.settings(i)
        rows.append(
            [
                str(results.columns["number"][i]),
                *(_short(setting_text(settings.get(axis))) for axis in results.axes),
                *(
                    number(float(results.columns[name][i]), digits)
                    for name, (_, digits) in FIGURE_HEADS.items()
                ),
                results.columns["error"][i] if not results.done[i] else "done",
            ]
        )
    return heads, rows


def number(value: float, digits: int) -> str:
    """A figure with so many decimals, "n/a" for NaN."""
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
