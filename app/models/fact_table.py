"""Facts about a round as a table of two columns with headings between them."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor, QFont

from app.models.step_facts import Fact

_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()


class FactTable(QAbstractTableModel):
    """Labels at the left, values at the right; a heading has no value."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.muted_colour = QColor()
        self.facts: list[Fact] = []

    def show_facts(self, facts: list[Fact]) -> None:
        """Show other lines."""
        self.beginResetModel()
        self.facts = facts
        self.endResetModel()

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.facts)

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else 2

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        fact, is_value = self.facts[index.row()], index.column() == 1
        if role == Qt.ItemDataRole.DisplayRole:
            return fact.value if is_value else fact.label
        if role == Qt.ItemDataRole.ToolTipRole:
            return f"{fact.value}\n{fact.tip}".strip() or None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            flag = Qt.AlignmentFlag
            side = flag.AlignRight if is_value else flag.AlignLeft
            return side | (flag.AlignBottom if fact.is_heading else flag.AlignVCenter)
        if role == Qt.ItemDataRole.FontRole and fact.is_heading:
            font = QFont()
            font.setBold(True)
            return font
        if role == Qt.ItemDataRole.ForegroundRole and not is_value and not fact.is_heading:
            return self.muted_colour
        return None
