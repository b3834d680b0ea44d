"""Cells with a probability: a bar from the left, the figure at the right."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRect
from PySide6.QtGui import QPainter
from PySide6.QtWidgets import QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.looks.theme import Theme
from app.models.position_detail import BAR_ROLE, DIFFERS_ROLE

_BAR_HEIGHT = 6
_PAD = 4


class ProbabilityDelegate(QStyledItemDelegate):
    """Draws the bar of BAR_ROLE under what the style draws; cells without one are plain."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme

    def paint(
        self,
        painter: QPainter,
        option: QStyleOptionViewItem,
        index: QModelIndex | QPersistentModelIndex,
    ) -> None:
        super().paint(painter, option, index)
        p = index.data(BAR_ROLE)
        if p is None:
            return
        cell: QRect = option.rect
        figure = option.fontMetrics.horizontalAdvance("▲ 0.000") + 3 * _PAD
        room = cell.width() - figure
        if room < 2 * _PAD:
            return
        role = "rejected.line" if index.data(DIFFERS_ROLE) else "accepted.line"
        top = cell.center().y() - _BAR_HEIGHT // 2
        width = max(1, round(p * room))
        painter.fillRect(cell.left() + _PAD, top, width, _BAR_HEIGHT, self._theme.color(role))
