"""Two runs side by side: their figures, and the first token at which their texts differ."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHeaderView, QSizePolicy, QVBoxLayout, QWidget

from app.panels.runs.run_pair_table import RunPairTable
from app.trace_models.run_axis import RunOverlay
from app.trace_models.run_comparison import compare_runs, text_difference
from app.trace_models.run_facts import run_names
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
