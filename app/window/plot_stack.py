"""Plots that stand one under the other: equally wide, with one x-axis below the last of them."""

from __future__ import annotations

from itertools import zip_longest

from PySide6.QtCore import QEvent, QObject, QPoint, QTimer
from PySide6.QtWidgets import QDockWidget

from app.panels.plots.round_view import RoundView

_A_STACK = 3
_MOVES = (QEvent.Type.Resize, QEvent.Type.Move, QEvent.Type.Show, QEvent.Type.Hide)


class PlotStack(QObject):
    """Watches where docks with plots over the same axis are."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._views: list[RoundView] = []
        self._asked = False

    def add(self, dock: QDockWidget, view: RoundView) -> None:
        """Watch one more dock, which holds this view."""
        self._views.append(view)
        dock.installEventFilter(self)
        dock.visibilityChanged.connect(self._ask)
        self._ask()

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if event.type() in _MOVES:
            self._ask()
        return False

    def _ask(self, *_: object) -> None:
        if not self._asked:
            self._asked = True
            QTimer.singleShot(0, self, self.arrange)  # after the other docks' moves

    def arrange(self) -> None:
        """Tell every plot in sight what is below it, and how wide the others' legends are."""
        self._asked = False
        for stack in self._stacks():
            for view in stack:
                view.set_stacked(len(stack) >= _A_STACK)
            wide = max(view.legend_width for view in stack)
            for view, below in zip_longest(stack, stack[1:]):
                bare = below is not None and view.is_plot_alone and below.is_plot_alone
                view.take_place(wide, has_axis=not bare)

    def _stacks(self) -> list[list[RoundView]]:
        """Views in sight that have the same edges at the left and right, from top to bottom."""
        stacks: dict[tuple[object, int, int], list[tuple[int, RoundView]]] = {}
        for view in self._views:
            if view.in_sight:
                at = view.mapTo(view.window(), QPoint())
                key = (view.window(), at.x(), view.width())
                stacks.setdefault(key, []).append((at.y(), view))
        return [[v for _, v in sorted(s, key=lambda pair: pair[0])] for s in stacks.values()]
