"""The figures of two runs as a table: one, the other, and the one as a multiple of the other."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.trace_models.plain_tip import plain_tip
from app.trace_models.run_comparison import FigurePair

_Index = QModelIndex | QPersistentModelIndex
_SHORT = 24
"""Characters of both names that a heading has room for."""
_NOWHERE = QModelIndex()
_LABEL, _FIRST, _SECOND, _RATIO = range(4)


class RunPairTable(QAbstractTableModel):
    """Lines are figures."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.pairs: list[FigurePair] = []
        self._runs = ("", "")

    def show_pairs(self, runs: tuple[str, str], pairs: list[FigurePair]) -> None:
        """Show these figures of two runs, which go by these names."""
        same_lines = [p.label for p in pairs] == [p.label for p in self.pairs]
        if same_lines and runs == self._runs:
            self.pairs = pairs
            last = self.index(len(pairs) - 1, _RATIO)
            self.dataChanged.emit(self.index(0, _FIRST), last)
            return
        self.beginResetModel()
        self._runs, self.pairs = runs, pairs
        self.endResetModel()

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.pairs)

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else 4

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation is not Qt.Orientation.Horizontal:
            return None
        first, second = self._runs
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            ratio = " / ".join(name.removeprefix("run ") for name in self._runs)
            if role == Qt.ItemDataRole.DisplayRole and len(ratio) > _SHORT:
                ratio = "ratio"  # the tool tip has both names
            return ("figure", first, second, ratio)[section]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _side(section)
        return None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        pair, column = self.pairs[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            if column == _LABEL:
                return pair.label
            if column == _RATIO:
                return pair.ratio_text
            return pair.text(column - _FIRST)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(pair.tip)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _side(column)
        return None


def _side(column: int) -> Qt.AlignmentFlag:
    side = Qt.AlignmentFlag.AlignLeft if column == _LABEL else Qt.AlignmentFlag.AlignRight
    return side | Qt.AlignmentFlag.AlignVCenter
