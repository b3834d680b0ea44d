"""Sizes as labelled bars on one scale."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QRect, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPalette
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.looks.theme import Theme
from engine.size_text import size_text

_BAR_HEIGHT = 6
_ROW_GAP = 4


class SizeBars(QWidget):
    """One row per entry: name, bar, size. The bars share the scale of the largest entry."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._sizes: dict[str, int] = {}
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Memory estimate")

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Show these byte counts in this order."""
        self._sizes = dict(sizes)
        text = ", ".join(f"{name} {size_text(n)}" for name, n in sizes.items())
        self.setAccessibleDescription(text)
        self.updateGeometry()
        self.update()

    def retheme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(12 * self.fontMetrics().averageCharWidth(), self._row() * len(self._sizes))

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        metrics = self.fontMetrics()
        label = max((metrics.horizontalAdvance(f"{n}  ") for n in self._sizes), default=0)
        figure = metrics.horizontalAdvance("8,888 MiB ")
        room = max(0, self.width() - label - figure)
        most = max(self._sizes.values(), default=0)
        muted = self.palette().color(QPalette.ColorRole.PlaceholderText)
        for index, (name, n) in enumerate(self._sizes.items()):
            row = QRect(0, index * self._row(), self.width(), self._row())
            painter.setPen(muted)
            painter.drawText(row, Qt.AlignmentFlag.AlignVCenter, name)
            painter.setPen(self.palette().color(QPalette.ColorRole.WindowText))
            painter.drawText(
                row, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignRight, size_text(n)
            )
            width = max(2, round(room * n / most)) if n and most else 0
            top = row.center().y() - _BAR_HEIGHT // 2
            painter.fillRect(label, top, width, _BAR_HEIGHT, self._theme.color("ui.accent"))
        painter.end()

    def _row(self) -> int:
        return self.fontMetrics().height() + _ROW_GAP
