"""A table of values to be drawn as colours, and the colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PySide6.QtGui import QColor

from app.looks.theme import Theme

BEST, CURRENT = "best", "current"
_LEAST = 0.1
"""Share of the full colour that the lowest value has."""


@dataclass(frozen=True)
class HeatMap:
    """values: float [n_y, n_x], NaN where there is none; row 0 is drawn at the bottom. y_name:
    empty for a single row without a name. texts: of the cells, [n_y][n_x]. marks: BEST
    or CURRENT by (row, column); a cell may be both."""

    x_name: str
    y_name: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    values: np.ndarray
    texts: tuple[tuple[str, ...], ...]
    marks: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def place(self, row: int, column: int) -> str:
        """Where a cell is, in words."""
        across = f"{self.x_name} {self.x_labels[column]}"
        return f"{across}, {self.y_name} {self.y_labels[row]}" if self.y_name else across

    @property
    def shares(self) -> np.ndarray:
        """Where each value lies between the lowest, 0, and the highest, 1; NaN where there is
        none."""
        known = self.values[np.isfinite(self.values)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        if high <= low:
            return np.where(np.isfinite(self.values), 1.0, np.nan)
        shares: np.ndarray = (self.values - low) / (high - low)
        return shares


def cell_colours(theme: Theme, share: float) -> tuple[QColor, QColor]:
    """The colours of a cell and of the text in it; the ground changes into the accent."""
    ground, full = theme.color("plot.background"), theme.color("ui.accent")
    part = _LEAST + (1 - _LEAST) * share
    mixed = QColor.fromRgbF(
        *(a + part * (b - a) for a, b in zip(_parts(ground), _parts(full), strict=True))
    )
    inks = QColor("black"), QColor("white")  # on any ground, one of them has 4.5 : 1
    return mixed, max(inks, key=lambda ink: contrast(ink, mixed))


def contrast(one: QColor, other: QColor) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: QColor) -> float:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    r, g, b = (linear(part) for part in _parts(colour))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _parts(colour: QColor) -> tuple[float, float, float]:
    return colour.redF(), colour.greenF(), colour.blueF()
