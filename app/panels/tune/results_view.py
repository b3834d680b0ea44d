"""The Results panel: results of a sweep or of `draftscope tune`."""

from __future__ import annotations

from typing import Any

import numpy as np
from PySide6.QtCore import QItemSelection, QItemSelectionModel, QModelIndex, QSize, Qt, Signal
from PySide6.QtGui import QColor, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QComboBox,
    QLabel,
    QPushButton,
    QSizePolicy,
    QStackedWidget,
    QWidget,
)

from app.actions import Actions
from app.looks import Theme
from app.panels.tune.result_plots import ParetoPlot, ResultMap, map_axes, result_map
from app.trace_models.results import MEMORY, SPEED, ResultColumn, Results
from app.trace_models.shown_text import plain_tip
from app.widgets.build import hbox, made, split, turn, vbox
from app.widgets.empty_state import EmptyState
from app.widgets.fields import offer
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.heat_grid import HeatGrid
from app.widgets.plain_table import ColumnTable, TableColumn, plain_table

_SAMPLE_ROWS = 40
_MOST_CHARACTERS = 36
_LEAST_CHARACTERS, _CHOICE_CHARACTERS = 8, 22
"""Widths of a choice of what is plotted."""
_PAD = 18
_MARGIN, _SPACING = 8, 4
_MOST_SELECTED = 2000
_NO_AXIS = "nothing"
_BESIDE_FROM = 64
"""Width in characters from which the plots are side by side; below, they are stacked."""
_PLOTS_FROM, _BOTH_FROM = 16, 26
"""Heights in lines from which there is room for one plot below the table, and for two."""


class ResultsView(QStackedWidget):
    """A table that sorts by any column, a heat map over two settings, points over two figures. A
    choice in one is marked in the others; a double click opens a row's trace."""

    trace_asked = Signal(int)  # row of the results
    again_asked = Signal(object)  # Results

    def __init__(self, theme: Theme, actions: Actions) -> None:
        super().__init__()
        self.setAccessibleName("Results")
        self.results: Results | None = None
        """The results on show."""
        self._map: ResultMap | None = None
        self._axes_chosen = False
        self.model = ResultTable()
        self.table = plain_table(self.model, "Results")
        self.table.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.table.setSortingEnabled(True)
        self.table.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # paths begin and end alike
        self.table.activated.connect(lambda index: self._ask_trace(index))
        self.table.selectionModel().selectionChanged.connect(lambda *_: self._mark_selected())
        self.headline, self.note = ElidedLabel(), made(ElidedLabel, muted=True)
        self.again = made(
            QPushButton,
            "Read &Again",
            toolTip="Read the file again: a sweep may have added rows",
            clicked=lambda: self.again_asked.emit(self.results),
        )
        self.grid = HeatGrid(theme, "Mean of a figure by two settings")
        self.grid.chosen.connect(self._select_cell)
        self.grid.tip = self._cell_words
        self.pareto = ParetoPlot(theme)
        self.pareto.row_chosen.connect(lambda row: self._select(np.array([row])))
        self.map_x, self.map_y, self.map_figure = (
            _choice(name) for name in ("Column setting", "Row setting", "Figure in the cells")
        )
        self.pareto_x, self.pareto_y = _choice("X axis figure"), _choice("Y axis figure")
        for box in (self.map_x, self.map_y):
            box.activated.connect(lambda _: self._choose_axes())
        self.map_figure.activated.connect(lambda _: self._draw_map())
        for box in (self.pareto_x, self.pareto_y):
            box.activated.connect(lambda _: self._draw_points())
        self.empty = EmptyState(
            "No results",
            "Shows the jobs of draftscope sweep or the settings of draftscope tune: a table, a "
            "heat map and the best trade-offs.",
            [actions["file.open_results"]],
        )
        self.addWidget(self.empty)
        self.addWidget(self._page())
        self._theme = theme
        theme.apply(self._recolour)

    def _page(self) -> QWidget:
        self._head = hbox(self.headline, (self.note, 1), self.again)
        choices = (self.map_figure, "by", self.map_x, "and", self.map_y)
        self._map_part = _plot_part(self.grid, choices)
        self._pareto_part = _plot_part(self.pareto, (self.pareto_y, "over", self.pareto_x))
        self._plots = split(self._map_part, self._pareto_part)
        parts = split(self.table, self._plots, down=True)
        margins = _MARGIN, _SPACING, _MARGIN, _SPACING
        vbox(self._head, (parts, 1), of=(page := QWidget()), margins=margins, spacing=_SPACING)
        return page

    def minimumSizeHint(self) -> QSize:
        """With one plot across and none below the table: the others are hidden in a small view."""
        parts = self._map_part, self._pareto_part, self.empty
        wide = max(part.minimumSizeHint().width() for part in parts)
        high = self._head.minimumSize().height() + self.table.minimumHeight() + 3 * _SPACING
        return QSize(wide + 2 * _MARGIN, max(high, self.empty.minimumSizeHint().height()))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        metrics = self.fontMetrics()
        lines = event.size().height() / metrics.height()
        beside = event.size().width() >= _BESIDE_FROM * metrics.averageCharWidth()
        turn(self._plots, down=not beside)
        self._plots.setVisible(lines >= _PLOTS_FROM)
        self._pareto_part.setVisible(beside or lines >= _BOTH_FROM)

    def show_results(self, results: Results) -> None:
        """Show a result file; chosen axes and figures stay if it has them."""
        self.results = results
        self.headline.setText(results.title)
        self.headline.setToolTip(plain_tip(str(results.path)))
        self.note.setText(results.note)
        self.table.horizontalHeader().setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self.model.set_results(results)
        self._fit_columns(results)
        self._offer_axes(results)
        figures = results.figures
        for box, columns, first in (
            (self.map_figure, figures, SPEED),
            (self.pareto_x, figures, MEMORY if results.column(MEMORY) else 1),
            (self.pareto_y, figures, SPEED),
        ):
            _fill(box, columns, first)
        self.setCurrentIndex(1)
        self._draw_map()
        self._draw_points()

    def _offer_axes(self, results: Results) -> None:
        """Keep a chosen pair if these results have it, otherwise choose anew."""
        chosen = [box.currentData() for box in (self.map_x, self.map_y)]
        if not (self._axes_chosen and set(chosen) - {None} <= set(results.axes)):
            self._axes_chosen = False
            chosen = [*map_axes(results), None, None][:2]
        items = [(one.title, one.name) for name in results.axes if (one := results.column(name))]
        offer(self.map_x, items, chosen[0])
        offer(self.map_y, [*items, (_NO_AXIS, None)], chosen[1])

    def _choose_axes(self) -> None:
        self._axes_chosen = True
        self._draw_map()

    def _recolour(self) -> None:
        self.model.failed_colour = self._theme.color("status.error")

    def _chosen(self, box: QComboBox) -> ResultColumn | None:
        return self.results.column(box.currentData()) if self.results else None

    def _draw_map(self) -> None:
        results = self.results
        x, y, figure = map(self._chosen, (self.map_x, self.map_y, self.map_figure))
        self._map = None
        if results is not None and x is not None and figure is not None:
            self._map = result_map(results, x, y, figure)
        self.grid.set_map(None if self._map is None else self._map[0])

    def _draw_points(self) -> None:
        self.pareto.set_figures(self._chosen(self.pareto_x), self._chosen(self.pareto_y))
        self._mark_selected()

    def _cell_words(self, row: int, column: int) -> str:
        if self._map is None:
            return ""
        shown, rows = self._map[0], self._map[1].get((row, column))
        place = shown.place(row, column)
        if rows is None:
            return f"{place}: no result"
        of = f"mean of {len(rows):,} results" if len(rows) > 1 else "1 result"
        return f"{place}: {self.map_figure.currentText()} {shown.texts[row][column]}, {of}"

    def _select_cell(self, row: int, column: int) -> None:
        if self._map is not None:
            self._select(self._map[1].get((row, column), np.zeros(0, np.int64)))

    def _select(self, rows: np.ndarray) -> None:
        """Select rows of the results in the table and scroll to the first."""
        places = sorted(self.model.place_of(row) for row in rows[:_MOST_SELECTED].tolist())
        chosen, last = QItemSelection(), self.model.columnCount() - 1
        for place in places:
            chosen.select(self.model.index(place, 0), self.model.index(place, last))
        flags = QItemSelectionModel.SelectionFlag
        model = self.table.selectionModel()
        if places:
            first = self.model.index(places[0], 0)
            model.setCurrentIndex(first, flags.NoUpdate)
            self.table.scrollTo(first)
        model.select(chosen, flags.ClearAndSelect)

    def _mark_selected(self) -> None:
        places = [index.row() for index in self.table.selectionModel().selectedRows()]
        self.pareto.choose(self.model.order[places[:_MOST_SELECTED]])

    def _ask_trace(self, index: QModelIndex) -> None:
        if index.isValid():
            self.trace_asked.emit(int(self.model.order[index.row()]))

    def _fit_columns(self, results: Results) -> None:
        metrics = self.table.fontMetrics()
        most = _MOST_CHARACTERS * metrics.averageCharWidth()
        for at, column in enumerate(results.columns):
            sample = np.unique(np.linspace(0, max(0, results.n - 1), _SAMPLE_ROWS).astype(int))
            texts = [f"{column.title} ▼", *(column.text(row) for row in sample if results.n)]
            width = max(map(metrics.horizontalAdvance, texts)) + _PAD
            self.table.setColumnWidth(at, min(width, most))
        self.table.horizontalHeader().setStretchLastSection(True)


def _plot_part(plot: QWidget, words: tuple[QComboBox | str, ...]) -> QWidget:
    """A plot with the choices of what it shows above it."""
    parts = (QLabel(word) if isinstance(word, str) else (word, 1) for word in words)
    row = hbox(*parts, 0, spacing=4)
    vbox(row, (plot, 1), 0, of=(part := QWidget()), margins=(0, 2, 0, 0), spacing=2)
    return part


def _choice(name: str) -> QComboBox:
    box = made(QComboBox, accessibleName=name, toolTip=name, focusPolicy=Qt.FocusPolicy.StrongFocus)
    box.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
    character = box.fontMetrics().averageCharWidth()
    box.setMinimumWidth(_LEAST_CHARACTERS * character)
    box.setMaximumWidth(_CHOICE_CHARACTERS * character)
    return box


def _fill(box: QComboBox, columns: list[ResultColumn], first: int | str) -> None:
    """Offer columns, with the previous choice or else the first one (a name or an index)."""
    names = [column.name for column in columns]
    usual = names[first : first + 1] if isinstance(first, int) else [first]
    wanted = [name for name in (box.currentData(), *usual) if name in names]
    offer(box, ((one.title, one.name) for one in columns), next(iter(wanted or names), None))


class ResultTable(ColumnTable):
    """Rows are numbered as in the results; `order` is the order of display."""

    def __init__(self) -> None:
        super().__init__()
        self.results: Results | None = None
        self.failed_colour = QColor()
        self.order: np.ndarray = np.zeros(0, np.int64)
        """The row of the results that each row of the table shows, int64 [n]."""

    def set_results(self, results: Results) -> None:
        """Show these rows in their own order."""
        self.beginResetModel()
        self.results = results
        self.columns = [TableColumn(c.name, c.title, c.tip, c.is_text) for c in results.columns]
        self.order = np.arange(results.n)
        self.endResetModel()

    def place_of(self, row: int) -> int:
        """The table's row of a row of the results."""
        return int(np.flatnonzero(self.order == row)[0])

    def n_rows(self) -> int:
        return len(self.order)

    def cell(self, row: int, name: str, role: int) -> Any:
        results, at = self.results, int(self.order[row])
        assert results is not None
        if role == Qt.ItemDataRole.DisplayRole and (column := results.column(name)) is not None:
            return column.text(at)
        if role == Qt.ItemDataRole.ToolTipRole:
            return results.error(at) or results.about(at)
        if role == Qt.ItemDataRole.ForegroundRole and results.error(at):
            return self.failed_colour
        return None

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        """Sort by one column; rows without a value are last either way. A column below 0: as
        read."""
        results = self.results
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
