"""The rows of results as a table that can be sorted by any column."""

from __future__ import annotations

from typing import Any

import numpy as np
from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QColor

from app.trace_models.plain_tip import plain_tip
from app.trace_models.results import Results

_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class ResultTable(QAbstractTableModel):
    """Rows are numbered as in the results; `order` is how they are shown."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._results: Results | None = None
        self.failed_colour = QColor()
        self.order: np.ndarray = np.zeros(0, np.int64)
        """The row of the results that each row of the table shows, int64 [n]."""

    def set_results(self, results: Results | None) -> None:
        """Show these rows in their own order, or none."""
        self.beginResetModel()
        self._results = results
        self.order = np.arange(0 if results is None else results.n)
        self.endResetModel()

    def place_of(self, row: int) -> int:
        """The place of a row of the results in the table."""
        return int(np.flatnonzero(self.order == row)[0])

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.order)

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() or self._results is None else len(self._results.columns)

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        results = self._results
        if results is None or orientation is not Qt.Orientation.Horizontal:
            return None
        if section >= len(results.columns):
            return None
        column = results.columns[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.title
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(column.tip)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column.is_text else _RIGHT
        return None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        results = self._results
        if results is None or not index.isValid():
            return None
        column, row = results.columns[index.column()], int(self.order[index.row()])
        if role == Qt.ItemDataRole.DisplayRole:
            return column.text(row)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(results.error(row) or results.about(row))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column.is_text else _RIGHT
        if role == Qt.ItemDataRole.ForegroundRole and results.error(row):
            return self.failed_colour
        return None

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        """By one column; rows without a value stand last either way. A column below 0: as read."""
        results = self._results
        if results is None:
            return
        self.layoutAboutToBeChanged.emit()
        held = self.persistentIndexList()
        rows = [int(self.order[index.row()]) for index in held]
        if column < 0:
            self.order = np.arange(results.n)
        else:
            self.order = _sorted(results, column, order)
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        moved = [
            self.index(int(place[row]), index.column())
            for row, index in zip(rows, held, strict=True)
        ]
        self.changePersistentIndexList(held, moved)
        self.layoutChanged.emit()


def _sorted(results: Results, column: int, order: Qt.SortOrder) -> np.ndarray:
    of = results.columns[column]
    rows = of.order()
    if order is Qt.SortOrder.AscendingOrder:
        return rows
    empty = np.array([not v for v in of.values]) if of.is_text else np.isnan(of.values)
    n_known = int((~empty).sum())
    return np.concatenate([rows[:n_known][::-1], rows[n_known:]])
