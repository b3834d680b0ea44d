"""Tables of figures, with models of fixed columns, columns that are hidden if they do not fit, and
cells that draw a probability as a bar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from PySide6.QtCore import (
    QAbstractItemModel,
    QAbstractTableModel,
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    Qt,
    Signal,
)
from PySide6.QtGui import QGuiApplication, QImage, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
)

from app.looks import figures_font
from app.trace_models.shown_text import plain_tip

_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()
_MIDDLE = Qt.AlignmentFlag.AlignVCenter
_SIDES = Qt.AlignmentFlag.AlignRight | _MIDDLE, Qt.AlignmentFlag.AlignLeft | _MIDDLE
"""Alignment of figures, and of text."""
# painting requests seven roles per cell, and each Qt enum look-up takes time
_ALIGNMENT, _TIP = Qt.ItemDataRole.TextAlignmentRole, Qt.ItemDataRole.ToolTipRole
_PICTURE = Qt.ItemDataRole.DecorationRole
_GAP = 8
_GAP_IN_CELL, _GAP_IN_TITLE = (QImage(_GAP - n, 1, QImage.Format.Format_Alpha8) for n in (6, 2))
"""Empty pictures, to which Qt adds a margin; otherwise text would touch the previous column's
figures."""
for _picture in (_GAP_IN_CELL, _GAP_IN_TITLE):
    _picture.fill(0)


class TableColumn(NamedTuple):
    """name: in code. Text is left-aligned, figures right-aligned."""

    name: str
    title: str
    tip: str
    is_text: bool = False


class ColumnTable(QAbstractTableModel):
    """A table model; subclasses implement `cell`, and `n_rows` if lines are not `rows`."""

    columns: Sequence[TableColumn] = ()
    rows: Sequence[Any] = ()

    def show_rows(self, rows: Sequence[Any], columns: Sequence[TableColumn] | None = None) -> None:
        """Show other rows, and other columns if given."""
        self.beginResetModel()
        self.rows = rows
        self.columns = self.columns if columns is None else columns
        self.endResetModel()

    def n_rows(self) -> int:
        return len(self.rows)

    def cell(self, row: int, name: str, role: int) -> Any:
        """The data of a cell for an item role other than alignment, or None."""
        raise NotImplementedError

    def column_of(self, name: str) -> int:
        """Index of a column by name. Raises ValueError for an unknown name."""
        return [column.name for column in self.columns].index(name)

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else self.n_rows()

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.columns)

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation is not Qt.Orientation.Horizontal or section >= len(self.columns):
            return None
        column = self.columns[section]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.title
        if role == _TIP:
            return plain_tip(column.tip)
        if role == _PICTURE and self.has_gap(section):
            return _GAP_IN_TITLE
        return _SIDES[column.is_text] if role == _ALIGNMENT else None

    def has_gap(self, column: int) -> bool:
        """Whether a column needs a gap before it."""
        return column > 0 and self.columns[column].is_text

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        column = self.columns[index.column()]
        if role == _ALIGNMENT:
            return _SIDES[column.is_text]
        value = self.cell(index.row(), column.name, role)
        if value is None and role == _PICTURE and self.has_gap(index.column()):
            return _GAP_IN_CELL
        return plain_tip(value) if value and role == _TIP else value


BAR_ROLE = Qt.ItemDataRole.UserRole
"""A probability drawn as a bar, None for a cell of text."""
BAR_COLOUR_ROLE = Qt.ItemDataRole.UserRole + 1
"""The colour of the bar."""
_ROW_PAD = 5
_LEAST_ROWS = 3
"""Including the header; more rows scroll."""


def plain_table(model: QAbstractItemModel, name: str) -> QTableView:
    """A read-only table with low rows, no grid and tabular figures; its menu copies it."""
    table = QTableView()
    table.setModel(model)
    table.setAccessibleName(name)
    table.setFont(figures_font())
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
    table.setTabKeyNavigation(False)
    table.setShowGrid(False)
    table.setWordWrap(False)
    table.setAlternatingRowColors(True)
    table.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.horizontalHeader().setHighlightSections(False)
    rows = table.verticalHeader()
    rows.hide()
    rows.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    rows.setMinimumSectionSize(1)
    rows.setDefaultSectionSize(table.fontMetrics().height() + _ROW_PAD)
    table.setMinimumHeight(_LEAST_ROWS * rows.defaultSectionSize())
    table.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)
    clipboard = QGuiApplication.clipboard()
    table.addAction("Copy Table", lambda: clipboard.setText(table_text(table)))
    return table


def table_text(table: QTableView) -> str:
    """A table, or its selected rows if there are several, as lines with tabs, with titles."""
    model = table.model()
    chosen = sorted(index.row() for index in table.selectionModel().selectedRows())
    rows = chosen if len(chosen) > 1 else range(model.rowCount())
    columns = range(model.columnCount())
    across, down = Qt.Orientation.Horizontal, Qt.Orientation.Vertical
    lines = [[None, *(model.headerData(column, across) for column in columns)]]
    for row in rows:
        cells = (model.index(row, column).data() for column in columns)
        lines.append([model.headerData(row, down), *cells])
    left = int(table.verticalHeader().isHidden())
    return "".join("\t".join(map(_in_a_line, line[left:])) + "\n" for line in lines)


def _in_a_line(cell: object) -> str:
    return "" if cell is None else " ".join(str(cell).split())


def fit_height(table: QTableView, most_rows: int | None = None) -> None:
    """Adjust the height to all rows, or to the first ones, so that the panel scrolls and not the
    table."""
    n = table.model().rowCount()
    shown = n if most_rows is None else min(n, most_rows)
    header = table.horizontalHeader()
    height = header.sizeHint().height() if not header.isHidden() else 0
    table.setFixedHeight(height + shown * table.verticalHeader().defaultSectionSize() + 2)


CELL_PAD = 12
"""Padding of a cell, both sides together."""


def fit_width(table: QTableView, column: int, sample: str) -> int:
    """Make a column as wide as its title and a sample; returns the width."""
    model = table.model()
    title = str(model.headerData(column, Qt.Orientation.Horizontal))
    width = max(map(table.fontMetrics().horizontalAdvance, (title, sample))) + CELL_PAD
    if isinstance(model, ColumnTable) and model.has_gap(column):
        width += _GAP
    table.setColumnWidth(column, width)
    return width


class FittedColumns(QObject):
    """Columns of fixed width, by title and sample text, so that nothing moves from round to round.
    `changed`: other columns are hidden."""

    changed = Signal()

    def __init__(self, table: QTableView, samples: Sequence[str]) -> None:
        super().__init__(table)
        self._table, self._samples = table, samples
        self.left_out: tuple[int, ...] = ()
        """Columns hidden for lack of space, from the right."""
        self._empty: frozenset[int] = frozenset()
        self._hidden: frozenset[int] = frozenset()
        table.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        table.installEventFilter(self)
        table.viewport().installEventFilter(self)
        self._size()

    def hide_empty(self, columns: Iterable[int]) -> None:
        """Hide columns that are empty now."""
        if (empty := frozenset(columns)) != self._empty:
            self._empty = empty
            self._fit()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and watched is self._table.viewport():
            self._fit()
        elif event.type() == QEvent.Type.FontChange and watched is self._table:
            self._size()
        return super().eventFilter(watched, event)

    def _size(self) -> None:
        self._widths = [fit_width(self._table, i, text) for i, text in enumerate(self._samples)]
        self._fit()

    def _fit(self) -> None:
        room = self._table.viewport().width()
        left_out: list[int] = []
        for column, width in enumerate(self._widths):
            if column in self._empty:
                continue
            room -= width
            if left_out or (room < 0 and column):
                left_out.append(column)
        hidden = self._empty.union(left_out)
        if hidden != self._hidden:
            self._hidden, self.left_out = hidden, tuple(left_out)
            for column in range(len(self._widths)):
                self._table.setColumnHidden(column, column in hidden)
            self.changed.emit()


_BAR_HEIGHT = 6
_PAD = 4


class ProbabilityDelegate(QStyledItemDelegate):
    """Draws the bar of BAR_ROLE below the style's own drawing."""

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
        top = cell.center().y() - _BAR_HEIGHT // 2
        width = max(1, round(p * room))
        painter.fillRect(cell.left() + _PAD, top, width, _BAR_HEIGHT, index.data(BAR_COLOUR_ROLE))
