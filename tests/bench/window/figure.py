"""One measured figure next to its goal, and many of them as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEAD = ("measure", "figure", "value", "unit", "goal", "")
NO_GOAL = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value that should be at most `goal`; None where there is no goal."""

    measure: str
    name: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met, None without one."""
        return None if self.goal is None else self.value <= self.goal


def figure_table(figures: Iterable[Figure]) -> str:
    """The figures as aligned text with a head line."""
    cells: list[tuple[str, ...]] = [HEAD]
    for figure in figures:
        goal = NO_GOAL if figure.goal is None else f"<= {figure.goal:g}"
        verdict = {True: "met", False: "missed", None: ""}[figure.met]
        value = f"{figure.value:.4g}"
        cells.append((figure.measure, figure.name, value, figure.unit, goal, verdict))
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i == HEAD.index("value") else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
