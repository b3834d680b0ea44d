"""The axes of a plot. Figures of the left one keep clear of each other however low the plot is."""

from __future__ import annotations

from typing import Any

import pyqtgraph as pg

_CUT = 2
"""Pixels of a figure beyond the edge that take nothing of it but air."""
_STEPS = ((1.0, 2.0), (2.0, 2.5), (5.0, 2.0))
"""First digits of round steps, and what makes each of them the next one."""


def wider_step(step: float) -> float:
    """The next round step: 1, 2, 5, 10, 20 …"""
    digit = float(f"{step:e}"[0])
    return step * next(factor for first, factor in reversed(_STEPS) if digit >= first)


class PlotAxis(pg.AxisItem):
    """pyqtgraph lays the name of an axis out again with every change of range or colour."""

    _html = ""

    def _updateLabel(self) -> None:
        html = self.labelString()
        if html != self._html:
            self._html = html
            super()._updateLabel()
        self.picture = None
        self.update()


class ValueAxis(PlotAxis):
    """pyqtgraph counts on three figures at least, which overlap where there is room for two, and
    draws the upper one outside of the plot."""

    def __init__(self) -> None:
        super().__init__("left")
        self.line_height = 1
        """Pixels that a figure takes."""

    def tickSpacing(self, low: float, high: float, size: float) -> list[tuple[float, float]]:
        """Steps of the ticks as (step, offset), for values low..high on `size` pixels."""
        levels: list[tuple[float, float]] = super().tickSpacing(low, high, size)
        room = size / self.line_height
        if not levels or (high - low) / levels[0][0] <= room:
            return levels
        step = levels[0][0]
        while (high - low) / step > room and wider_step(step) <= high - low:
            step = wider_step(step)
        return [(step, 0.0)]

    def generateDrawSpecs(self, p: object) -> Any:
        """What is drawn: the axis, ticks and figures without those that the upper edge cuts."""
        specs = super().generateDrawSpecs(p)
        if specs is None:
            return None
        axis, ticks, texts = specs
        top = -self.scenePos().y() - _CUT
        return axis, ticks, [text for text in texts if text[0].top() >= top]
