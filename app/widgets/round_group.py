"""Views over one x-axis that take in the trace together."""

from __future__ import annotations

from typing import Protocol

from PySide6.QtCore import QObject

from app.looks.pacer import Pacer

PERIOD_MS = 400
"""Plots move at most so often: nobody reads them faster, and the engine needs the time."""


class GrowingView(Protocol):
    """A view that reads without drawing, and draws what it has read."""

    def take_in(self) -> bool: ...

    def show_new(self) -> None: ...


class RoundGroup:
    """Reads for all its views before any of them is drawn: the trace grows meanwhile, and every
    view that knew of more rounds than the one before would move the axis of all of them."""

    def __init__(self, first: GrowingView, parent: QObject) -> None:
        self._views = [first]
        self._pacer = Pacer(self._refresh, PERIOD_MS, parent)
        self.ask, self.now, self.stop = self._pacer.ask, self._pacer.now, self._pacer.stop

    def add(self, view: GrowingView) -> None:
        """Another view over the same axis."""
        self._views.append(view)

    def _refresh(self) -> None:
        for view in [view for view in self._views if view.take_in()]:
            view.show_new()
