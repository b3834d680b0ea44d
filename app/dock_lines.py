"""A thin line between docks and centre, so that areas of one colour do not run together."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QRect
from PySide6.QtGui import QPainter, QPalette
from PySide6.QtWidgets import QDockWidget, QMainWindow, QStyle


class DockLines(QObject):
    """Draws in the middle of the window's separators. A style sheet could do it too, but would
    slow every widget down, and so would a style in Python."""

    def __init__(self, window: QMainWindow) -> None:
        super().__init__(window)
        self._window = window
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint:
            self._paint()  # Qt's handles come over it
        return super().eventFilter(watched, event)

    def lines(self) -> list[QRect]:
        """The frames of all areas; those of neighbours share the pixel between them."""
        style = self._window.style()
        extent = style.pixelMetric(QStyle.PixelMetric.PM_DockWidgetSeparatorExtent, None, None)
        after = extent // 2
        before = extent - after
        return [area.adjusted(-before, -before, after, after) for area in self._areas()]

    def _areas(self) -> list[QRect]:
        window = self._window
        areas = [
            dock.geometry()
            for dock in window.findChildren(QDockWidget)
            if not dock.isHidden()
            and not dock.isFloating()
            and window.rect().contains(dock.geometry().center())
        ]
        centre = window.centralWidget()
        return areas if centre is None else [centre.geometry(), *areas]

    def _paint(self) -> None:
        inside = QRect()
        for area in self._areas():
            inside = inside.united(area)
        painter = QPainter(self._window)
        painter.setClipRect(inside)
        painter.setPen(self._window.palette().color(QPalette.ColorRole.Mid))
        for line in self.lines():
            painter.drawRect(line)
        painter.end()
