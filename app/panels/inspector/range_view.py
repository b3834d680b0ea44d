"""A range of rounds as a subject: its figures next to those of the whole run, and next to another
range that was kept."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QLabel, QToolButton, QWidget

from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.number_text import NOT_OBSERVED
from app.trace_models.run_range import RunRange, range_figures
from app.widgets.build import hbox, made, vbox
from app.widgets.plain_table import fit_height, plain_table
from engine.report.parts import ReportTable
from engine.report.text import table_lines

_HINT = (
    "Drag over rounds in any plot, or over text, to choose a range. Keep it, and the next one is "
    "compared with it. Esc: back to the round under the cursor."
)


class RangeTable(ColumnTable):
    """Lines are figures, columns are ranges. Figures that nothing has are left out."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__((), parent)
        self.lines: list[tuple[str, ...]] = []

    def show_ranges(self, ranges: list[RunRange]) -> None:
        """A column for each."""
        figures = [range_figures(one) for one in ranges]
        self.beginResetModel()
        self.heads = ["", *(one.title for one in ranges)]
        self._columns = tuple(
            TableColumn(str(at), head, head, not at) for at, head in enumerate(self.heads)
        )
        cells = ((label, *(one[label] for one in figures)) for label in figures[0])
        self.lines = [line for line in cells if set(line[1:]) - {NOT_OBSERVED, ""}]
        self.endResetModel()

    def n_rows(self) -> int:
        return len(self.lines)

    def cell(self, row: int, name: str, role: int) -> Any:
        return self.lines[row][int(name)] if role == Qt.ItemDataRole.DisplayRole else None

    def markdown(self) -> str:
        """The table for a comment."""
        table = ReportTable(self.heads, [tuple(map(str.strip, line)) for line in self.lines])
        return "\n".join(table_lines(table)) + "\n"


class RangeView(QWidget):
    """The figures of a range. closed: back to the round under the cursor. zoom_asked: bring the
    range into sight in the plots."""

    closed = Signal()
    zoom_asked = Signal(object)  # RunRange

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.shown: RunRange | None = None
        self._kept: RunRange | None = None
        self.title = made(QLabel, bold=True)
        self.model = RangeTable(self)
        self.table = plain_table(self.model, "Figures of the range and of the whole run")
        self.table.setSelectionMode(QAbstractItemView.SelectionMode.NoSelection)
        self.table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.keep = _button("&Keep", "Keep this range, to compare the next one with it")
        self.keep.setCheckable(True)
        self.zoom = _button("&Zoom", "Bring the range into sight in the plots (F)")
        self.copy = _button("Co&py", "Copy the table as Markdown")
        self.close_button = _button("✕", "Back to the round under the cursor (Esc)")
        self.close_button.setAccessibleName("Close the range")
        hint = made(QLabel, _HINT, wordWrap=True, muted=True)
        head = hbox((self.title, 1), self.keep, self.zoom, self.copy, self.close_button)
        vbox(head, self.table, hint, 1, of=self, margins=(8, 4, 8, 8), spacing=6)
        self.keep.toggled.connect(self._keep)
        self.zoom.clicked.connect(lambda: self.zoom_asked.emit(self.shown))
        self.copy.clicked.connect(self._copy)
        self.close_button.clicked.connect(self.closed)

    def show_range(self, chosen: RunRange | None) -> None:
        """Show a range next to the one that is kept, if any, and the whole run."""
        self.shown = chosen
        if chosen is None:
            self._kept = None
            self.keep.setChecked(False)
            return
        kept = [] if self._kept in (None, chosen) else [self._kept]
        self.title.setText(chosen.title)
        self.model.show_ranges([chosen, *kept, RunRange(chosen.run)])
        fit_height(self.table)

    def _keep(self, kept: bool) -> None:
        self._kept = self.shown if kept else None

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.model.markdown())


def _button(text: str, tip: str) -> QToolButton:
    return made(
        QToolButton, text=text, toolTip=tip, autoRaise=True, focusPolicy=Qt.FocusPolicy.TabFocus
    )
