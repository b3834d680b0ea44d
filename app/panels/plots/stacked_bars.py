"""Bars made of parts on top of each other, one kind of part for each brush."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen

from app.widgets.line_styles import plot_pen

_GAPS_FROM_PIXELS = 5.0
"""Bars at least as wide are parted by a gap."""
_GAP = 0.14


class StackedBars:
    """At most one bar for each column of pixels. `items` go into a plot."""

    def __init__(self, n_parts: int) -> None:
        self.items = [
            pg.BarGraphItem(x0=np.zeros(0), x1=np.zeros(0), y0=np.zeros(0), height=np.zeros(0))
            for _ in range(n_parts)
        ]
        self.n_bars = 0

    def set(self, x0: np.ndarray, x1: np.ndarray, heights: np.ndarray, pixel: float) -> None:
        """Draw bars x0..x1, [n], of parts [n_parts, n], the first at the bottom. pixel: the width
        of one pixel in units of x."""
        self.n_bars = len(x0)
        if self.n_bars and float(np.median(x1 - x0)) >= _GAPS_FROM_PIXELS * pixel:
            gap = (x1 - x0) * (_GAP / 2)
            x0, x1 = x0 + gap, x1 - gap
        tops = np.cumsum(heights, axis=0)
        for item, height, top in zip(self.items, heights, tops, strict=True):
            some = height > 0
            item.setOpts(x0=x0[some], x1=x1[some], y0=(top - height)[some], height=height[some])

    def clear(self) -> None:
        """Draw nothing."""
        if not self.n_bars:
            return
        none = np.zeros(0)
        self.set(none, none, np.zeros((len(self.items), 0)), 1.0)

    def recolour(self, colours: Sequence[QColor], patterns: Sequence[Qt.BrushStyle]) -> None:
        """A colour and a pattern for each part; patterns other than solid get an outline."""
        for item, colour, pattern in zip(self.items, colours, patterns, strict=True):
            pen = QPen(Qt.PenStyle.NoPen)
            if pattern is not Qt.BrushStyle.SolidPattern:
                pen = plot_pen(colour)
            item.setOpts(brush=QBrush(colour, pattern), pen=pen)


def sample(pattern: Qt.BrushStyle) -> Callable[[QPainter, QRect, QColor], None]:
    """A function that paints a sample of this fill pattern into a legend."""

    def draw(painter: QPainter, box: QRect, colour: QColor) -> None:
        painter.fillRect(box, QBrush(colour, pattern))
        if pattern is not Qt.BrushStyle.SolidPattern:
            painter.setPen(colour)
            painter.drawRect(box.adjusted(0, 0, -1, -1))

    return draw
