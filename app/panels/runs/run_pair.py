"""Two runs side by side: their figures, and the first token at which their texts differ."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHeaderView, QSizePolicy, QWidget

from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.run_comparison import FigurePair, compare_runs, text_difference
from app.trace_models.run_facts import run_names
from app.trace_models.run_rows import RunOverlay
from app.widgets.build import vbox
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
        vbox(self.text, (self.table, 1), of=self, margins=(0, 0, 0, 0), spacing=0)
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


_SHORT = 24
"""Characters of both names that a heading has room for."""


class RunPairTable(ColumnTable):
    """Lines are figures."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__([TableColumn("", "", "")] * 4, parent)
        self.pairs: list[FigurePair] = []
        self._runs = ("", "")

    def show_pairs(self, runs: tuple[str, str], pairs: list[FigurePair]) -> None:
        """Show these figures of two runs, which go by these names."""
        same_lines = [p.label for p in pairs] == [p.label for p in self.pairs]
        if same_lines and runs == self._runs:
            self.pairs = pairs
            self.dataChanged.emit(self.index(0, 1), self.index(len(pairs) - 1, 3))
            return
        self.beginResetModel()
        self._runs, self.pairs = runs, pairs
        both = " / ".join(name.removeprefix("run ") for name in runs)
        ratio = both if len(both) <= _SHORT else "ratio"
        titles = ("figure", "figure"), *((name, name) for name in runs), (ratio, both)
        self._columns = [TableColumn(str(i), *names, i == 0) for i, names in enumerate(titles)]
        self.endResetModel()

    def n_rows(self) -> int:
        return len(self.pairs)

    def cell(self, row: int, name: str, role: int) -> Any:
        pair = self.pairs[row]
        if role == Qt.ItemDataRole.ToolTipRole:
            return pair.tip
        if role == Qt.ItemDataRole.DisplayRole:
            return (pair.label, pair.text(0), pair.text(1), pair.ratio_text)[int(name)]
        return None
