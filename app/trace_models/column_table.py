"""What all table models with fixed columns have in common: titles, tooltips, alignment, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.trace_models.plain_tip import plain_tip

_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()
_MIDDLE = Qt.AlignmentFlag.AlignVCenter
_SIDES = Qt.AlignmentFlag.AlignRight | _MIDDLE, Qt.AlignmentFlag.AlignLeft | _MIDDLE
"""Of figures, and of text."""
# a painting asks for seven roles of every cell, and each look-up in Qt takes its time
_ALIGNMENT, _TIP = Qt.ItemDataRole.TextAlignmentRole, Qt.ItemDataRole.ToolTipRole


class TableColumn(NamedTuple):
    """name: what the code calls it. Text is aligned left, figures right."""

    name: str
    title: str
    tip: str
    is_text: bool = False


class ColumnTable(QAbstractTableModel):
    """Subclasses tell `cell`, and `n_rows` where lines are not `rows`."""

    def __init__(self, columns: Sequence[TableColumn], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._columns = columns
        self.rows: Sequence[Any] = ()

    def show_rows(self, rows: Sequence[Any], columns: Sequence[TableColumn] | None = None) -> None:
        """Show other rows, under other columns where they are given."""
        self.beginResetModel()
        self.rows = rows
        self._columns = self._columns if columns is None else columns
        self.endResetModel()

    def n_rows(self) -> int:
        return len(self.rows)

    def cell(self, row: int, name: str, role: int) -> Any:
        """The data of a cell for an item role other than alignment; None where it has none."""
        raise NotImplementedError

    def column_of(self, name: str) -> int:
        """The index of a column by its name. Raises ValueError for an unknown name."""
        return [column.name for column in self._columns].index(name)

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else self.n_rows()

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self._columns)

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation is not Qt.Orientation.Horizontal or section >= len(self._columns):
            return None
        column = self._columns[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.title
        if role == _TIP:
            return plain_tip(column.tip)
        return _SIDES[column.is_text] if role == _ALIGNMENT else None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        column = self._columns[index.column()]
        if role == _ALIGNMENT:
            return _SIDES[column.is_text]
        value = self.cell(index.row(), column.name, role)
        return plain_tip(value) if value and role == _TIP else value
