"""Columns of a table that is never scrolled sideways: those that do not fit are left out."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtWidgets import QTableView

_CELL_PAD = 12


class FittedColumns(QObject):
    """Every column is as wide as its title and its sample text, whatever is in it, so that
    nothing moves from round to round. `changed`: other columns are left out."""

    changed = Signal()

    def __init__(self, table: QTableView, samples: Sequence[str]) -> None:
        super().__init__(table)
        self._table, self._samples = table, samples
        self.left_out: tuple[int, ...] = ()
        """The columns that have no room, from the right."""
        table.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        table.installEventFilter(self)
        table.viewport().installEventFilter(self)
        self._size()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and watched is self._table.viewport():
            self._fit()
        elif event.type() == QEvent.Type.FontChange and watched is self._table:
            self._size()
        return super().eventFilter(watched, event)

    def _size(self) -> None:
        metrics, model = self._table.fontMetrics(), self._table.model()
        self._widths = []
        for column, sample in enumerate(self._samples):
            title = str(model.headerData(column, Qt.Orientation.Horizontal))
            width = max(metrics.horizontalAdvance(text) for text in (title, sample)) + _CELL_PAD
            self._table.setColumnWidth(column, width)
            self._widths.append(width)
        self._fit()

    def _fit(self) -> None:
        room, n_shown = self._table.viewport().width(), 0
        for width in self._widths:
            room -= width
            if room < 0:
                break
            n_shown += 1
        left_out = tuple(range(max(1, n_shown), len(self._widths)))
        if left_out != self.left_out:
            self.left_out = left_out
            for column in range(len(self._widths)):
                self._table.setColumnHidden(column, column in left_out)
            self.changed.emit()
