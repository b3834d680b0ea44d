"""Two runs side by side: their figures, and the first token at which their texts differ."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHeaderView, QSizePolicy, QVBoxLayout, QWidget

from app.trace_models.plain_tip import plain_tip
from app.trace_models.run_comparison import FigurePair, compare_runs, text_difference
from app.trace_models.run_facts import run_names
from app.trace_models.run_rows import RunOverlay
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.plain_table import plain_table


class RunPair(QWidget):
    """The table that compares the run on show with a second run.

    Hidden without a second run; figures are computed only while the table is in sight.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._overlay: RunOverlay | None = None
        self._size_shown: int | None = None
        self._verdict = ""
        self.model = RunPairTable(self)
        self.table = plain_table(self.model, "Run on show and overlaid run")
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        # cut, the names of figures begin alike
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.ResizeToContents)
        header.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.text = ElidedLabel()
        self.text.setContentsMargins(8, 4, 8, 4)
        self.text.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.text)
        column.addWidget(self.table, 1)
        self.hide()

    def set_overlay(self, overlay: RunOverlay | None) -> None:
        """Compare the run on show with this one, or hide."""
        self._overlay, self._size_shown, self._verdict = overlay, None, ""
        self.setVisible(overlay is not None)
        self.refresh()

    def say(self, sentence: str) -> None:
        """What came of comparing the texts of both, once they have ended."""
        self._verdict = sentence
        if sentence:
            self.text.setText(sentence)

    def refresh(self) -> None:
        """Bring the figures up to date, if somebody looks and there is something new."""
        overlay = self._overlay
        if overlay is None or not self.isVisible():
            return
        runs = overlay.over, overlay.run
        ended = overlay.over.ended and overlay.run.ended  # before the figures: those are then final
        size = -1 if ended else sum(run.store.size() for run in runs)
        if size == self._size_shown:
            return
        self._size_shown = size
        self.model.show_pairs(run_names(*runs), compare_runs(*runs))
        self.text.setText(self._verdict or text_difference(*runs))
        self._fit()

    def _fit(self) -> None:
        """No taller than its lines, so that the room left over goes to the list."""
        rows = self.table.verticalHeader().length() + self.table.horizontalHeader().height()
        height = rows + 2 * self.table.frameWidth()
        self.table.setMaximumHeight(height)
        self.setMaximumHeight(height + self.text.sizeHint().height())

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()


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
