"""A thin line between docks and centre, so that areas of one colour do not run together."""

from __future__ import annotations

from collections.abc import Collection

from PySide6.QtCore import QEvent, QObject, QRect
from PySide6.QtGui import QPainter, QPaintEvent, QPalette
from PySide6.QtWidgets import QDockWidget, QMainWindow, QStyle


class DockLines(QObject):
    """Draws in the middle of the window's separators. A style sheet could do it too, but would
    slow every widget down, and so would a style in Python. docks: all that the window has."""

    def __init__(self, window: QMainWindow, docks: Collection[QDockWidget]) -> None:
        super().__init__(window)
        self._window, self._docks = window, docks
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QPaintEvent):
            self._paint(event.rect())  # Qt's handles come over it
        return False

    def _areas(self) -> list[QRect]:
        window = self._window
        areas = [
            dock.geometry()
            for dock in self._docks
            if not dock.isHidden()
            and not dock.isFloating()
            and window.rect().contains(dock.geometry().center())
        ]
        centre = window.centralWidget()
        return areas if centre is None else [centre.geometry(), *areas]

    def _paint(self, part: QRect) -> None:
        areas = self._areas()
        if any(area.contains(part) for area in areas):
            return  # something in a panel that lets the window shine through
        inside = QRect()
        for area in areas:
            inside = inside.united(area)
        extent = self._window.style().pixelMetric(
            QStyle.PixelMetric.PM_DockWidgetSeparatorExtent, None, None
        )
        after = extent // 2
        before = extent - after
        painter = QPainter(self._window)
        painter.setClipRect(inside)
        painter.setPen(self._window.palette().color(QPalette.ColorRole.Mid))
        for area in areas:  # frames of neighbours share the pixel between them
            painter.drawRect(area.adjusted(-before, -before, after, after))
        painter.end()
