"""Tables of a comparison: all lanes at one position, and one lane at all positions."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from PySide6.QtCore import QModelIndex, Qt, Signal
from PySide6.QtGui import QColor, QFont, QResizeEvent
from PySide6.QtWidgets import QHeaderView, QSplitter, QTabWidget, QWidget

from app.looks import Theme, mark_front_tab
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.position_detail import BELOW, DetailRow, detail_rows
from app.trace_models.shown_text import NOT_OBSERVED, NOT_RECORDED, error_text, plain_tip
from app.widgets.line_styles import lane_pen
from app.widgets.plain_table import (
    BAR_COLOUR_ROLE,
    BAR_ROLE,
    CELL_PAD,
    ColumnTable,
    ProbabilityDelegate,
    TableColumn,
    fit_width,
    plain_table,
)
from engine.trace.records import MISSING

_SIDE_BY_SIDE = 150
"""Width in characters from which the tables are side by side."""
_TOKEN_CHARACTERS = 14
_LEAST_ROWS, _LOW_ROWS = 6, 4
_SAMPLES = {
    "pos": "12,345",
    "round": "1,234",
    "token": " continue",
    "verdict": "✗ beyond bound",
    "top-1": "≠ other",
    "rank": "4,096",
    "cells": "1,234",
}
_ERROR = "1.5e-12"
_LEAST_CELL = "checkpoint"
"""Also wide enough for any number."""


class LaneTables(QSplitter):
    """Two tables as tabs, or side by side where there is room."""

    pos_chosen = Signal(int)

    def __init__(self, theme: Theme) -> None:
        super().__init__(Qt.Orientation.Horizontal)
        self._lanes: ComparedLanes | None = None
        self.shown: int | None = None
        """The position at which all lanes are shown."""
        self._placing = False
        self._known: object = None
        self.detail_model = PositionDetail()
        self.position_model = PositionTable()
        self.detail = plain_table(self.detail_model, "Lanes at one position", selects=False)
        self._delegate = ProbabilityDelegate(self)
        self.detail.setItemDelegate(self._delegate)
        self.detail.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        least = self.detail.fontMetrics().horizontalAdvance(_LEAST_CELL) + CELL_PAD
        self.detail.horizontalHeader().setMinimumSectionSize(least)  # and the scroll bar
        self.detail.horizontalHeader().setDefaultAlignment(
            Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        )
        self.detail.horizontalHeader().setTextElideMode(Qt.TextElideMode.ElideRight)
        self.detail.verticalHeader().show()
        self.detail.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.positions = plain_table(self.position_model, "One lane at all positions")
        self.positions.selectionModel().selectionChanged.connect(self._on_selected)
        self._left, self._right = QTabWidget(), QTabWidget()
        self._left.addTab(self.detail, "Position")
        self._left.addTab(self.positions, "All positions")
        for tabs, name in ((self._left, "Figures of the lanes"), (self._right, "More figures")):
            for part in (tabs, tabs.tabBar()):
                part.setAccessibleName(name)
            tabs.setDocumentMode(True)
            mark_front_tab(tabs.tabBar())
            self.addWidget(tabs)
        self.setChildrenCollapsible(False)
        self._right.hide()
        self._fit_columns()
        self.set_low(False)
        self._theme = theme
        theme.apply(self._recolour)

    def set_low(self, low: bool) -> None:
        """Switch to the low layout, or back."""
        n_rows = _LOW_ROWS if low else _LEAST_ROWS
        rows = n_rows * self.detail.verticalHeader().defaultSectionSize()
        heads = self._left.tabBar().sizeHint().height() + 2 * self.fontMetrics().height()
        self.setMinimumHeight(rows + heads)

    def set_lane(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Show these lanes, one of them position by position."""
        self._lanes = lanes
        self._recolour()
        self.position_model.show_lane(lanes, run_id)
        tabs = self._tabs_of(self.positions)
        name = "All positions" if lanes is None else f"All positions of {lanes.names[run_id]}"
        tabs.setTabText(tabs.indexOf(self.positions), name)
        self.show_position(self.shown, self.shown)

    def draw(self) -> None:
        """Read the lanes' new rows and update both tables."""
        self.position_model.grow()
        self._show_detail()

    def show_position(self, pos: int | None, cursor: int | None) -> None:
        """Show the lanes at a position; selects the cursor's row of the other table."""
        self.shown = pos
        self._show_detail()
        title = "Position" if pos is None else f"Position {pos:,}"
        self._left.setTabText(self._left.indexOf(self.detail), title)
        row = None if cursor is None else self.position_model.row_of(cursor)
        self._placing = True
        if row is None:
            self.positions.clearSelection()
            self.positions.setCurrentIndex(QModelIndex())
        elif row != self.positions.currentIndex().row():
            self.positions.setCurrentIndex(self.position_model.index(row, 0))
        self._placing = False

    def _recolour(self) -> None:
        theme, lanes = self._theme, self._lanes
        if lanes is not None:
            others = [lane_pen(theme, lanes, run_id).color() for run_id in lanes.followers]
            self.detail_model.lane_colours = [theme.color("plot.text"), *others]
        self.detail_model.differs_colour = theme.color("rejected.line")
        self.detail_model.muted_colour = theme.color("ui.muted")
        self.position_model.beyond_colour = theme.color("status.error")
        for table in (self.detail, self.positions):
            table.viewport().update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        wide = self.width() >= _SIDE_BY_SIDE * self.fontMetrics().averageCharWidth()
        target = self._right if wide else self._left
        source = self._tabs_of(self.positions)
        if source is not target:
            title = source.tabText(source.indexOf(self.positions))
            target.addTab(self.positions, title)
            self._right.setVisible(wide)
            self.setSizes([self.width() // 2] * 2)

    def _show_detail(self) -> None:
        """Show the lanes at the position, if anything changed."""
        lanes, pos = self._lanes, self.shown
        known = None
        if lanes is not None and pos is not None:
            there = tuple(run for run in lanes.followers if lanes.row_at(run, pos) is not None)
            known = (lanes, pos, there, tuple(lanes.bounds.values()))
        if known != self._known or known is None:
            self._known = known
            self.detail_model.show_position(lanes, pos)

    def _tabs_of(self, page: QWidget) -> QTabWidget:
        return self._right if self._right.indexOf(page) >= 0 else self._left

    def _fit_columns(self) -> None:
        character = self.fontMetrics().averageCharWidth()
        self.detail.verticalHeader().setFixedWidth(_TOKEN_CHARACTERS * character)
        for at, column in enumerate(self.position_model.columns):
            fit_width(self.positions, at, _SAMPLES.get(column.title, _ERROR))

    def _on_selected(self) -> None:
        rows = self.positions.selectionModel().selectedRows()
        if rows and not self._placing:
            self.pos_chosen.emit(self.position_model.pos_of(rows[0].row()))


class PositionDetail(ColumnTable):
    """`detail_rows` as a table: a column for each lane, tokens and measures as row headers."""

    def __init__(self) -> None:
        super().__init__()
        self.differs_colour = QColor()
        self.muted_colour = QColor()
        self.lane_colours: list[QColor] = []
        """Colours of the lanes' bars, in the order of the columns."""
        self.rows: list[DetailRow] = []

    def show_position(self, lanes: ComparedLanes | None, pos: int | None) -> None:
        rows = detail_rows(lanes, pos) if lanes is not None and pos is not None else []
        names = [lanes.names[run_id] for run_id in lanes.run_ids] if lanes and rows else []
        known = [column.tip for column in self.columns]
        if rows != self.rows or names != known:
            titles = enumerate(name.replace(",", "\n", 1) for name in names)
            self.show_rows(rows, [TableColumn(str(i), title, names[i]) for i, title in titles])
            if names != known and rows:  # a header keeps its old height over a reset
                self.headerDataChanged.emit(Qt.Orientation.Horizontal, 0, len(names) - 1)

    def headerData(
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation is Qt.Orientation.Horizontal:
            is_side = role == Qt.ItemDataRole.TextAlignmentRole
            return None if is_side else super().headerData(section, orientation, role)
        if section >= len(self.rows):
            return None
        label, tip, _ = self.rows[section]
        return {
            Qt.ItemDataRole.DisplayRole: label,
            Qt.ItemDataRole.ToolTipRole: plain_tip(tip),
            Qt.ItemDataRole.TextAlignmentRole: Qt.AlignmentFlag.AlignLeft
            | Qt.AlignmentFlag.AlignVCenter,
        }.get(Qt.ItemDataRole(role))

    def cell(self, row: int, name: str, role: int) -> Any:
        cell = self.rows[row][2][int(name)]
        if role == Qt.ItemDataRole.DisplayRole:
            return cell.text
        if role == BAR_ROLE:
            return cell.bar
        if role == BAR_COLOUR_ROLE:
            return self.lane_colours[int(name)]
        if role == Qt.ItemDataRole.ForegroundRole:
            if cell.differs:
                return self.differs_colour
            is_muted = cell.text in (NOT_RECORDED, NOT_OBSERVED) or cell.text.startswith(BELOW)
            return self.muted_colour if is_muted else None
        if role == Qt.ItemDataRole.FontRole and (cell.best or cell.text == NOT_RECORDED):
            font = QFont()
            font.setBold(cell.best)
            font.setItalic(not cell.best)
            return font
        return None


_COLUMNS = (
    TableColumn("pos", "pos", "Position of the token chosen by these logits"),
    TableColumn("round", "round", "Round in which they were computed"),
    TableColumn("token_id", "token", "Token chosen by the reference lane", True),
    TableColumn("", "verdict", "Verdict, by the bound on the NMSE", True),
    TableColumn("max_abs", "max |Δ|", "Largest difference of a logit"),
    TableColumn("nmse", "NMSE", "Mean squared difference of the logits over their mean square"),
    TableColumn("kl", "KL, nats", "KL(reference || lane)"),
    TableColumn("top1_equal", "top-1", "Whether both have the same most probable token"),
    TableColumn("rank", "rank", "Rank of the chosen token among this lane's logits, from 1"),
    TableColumn("top2_gap", "top-2 gap", "The reference's largest logit minus its second largest"),
    TableColumn("state_error", "state", "Worst layer's relative error after the round"),
    TableColumn("conv_error", "window", "The same for convolution windows"),
    TableColumn("cells_differ", "cells", "KV cells in one lane only, or duplicates"),
)
_TEXT = tuple(column.name for column in _COLUMNS if column.is_text)
_NAMES = tuple(column.name for column in _COLUMNS if column.name)
_DISPLAY, _FOREGROUND = Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ForegroundRole


class PositionTable(ColumnTable):
    """Rows are positions. Those beyond the bound are marked and have the colour `beyond`."""

    columns = _COLUMNS

    def __init__(self) -> None:
        super().__init__()
        self.beyond_colour = QColor()
        self._lanes: ComparedLanes | None = None
        self._run_id = -1
        self._values: dict[str, np.ndarray] = {}
        self._n = 0
        self._bound = 0.0

    def show_lane(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Show a lane from its first position on, or nothing."""
        self.beginResetModel()
        self._lanes, self._run_id, self._n = lanes, run_id, 0
        self._take_values()
        self._n = len(self._values.get("pos", ()))
        self.endResetModel()

    def grow(self) -> None:
        """Add new positions; update verdicts if the bound has risen."""
        self._take_values()
        n = len(self._values.get("pos", ()))
        if n > self._n:
            self.beginInsertRows(QModelIndex(), self._n, n - 1)
            self._n = n
            self.endInsertRows()

    def row_of(self, pos: int) -> int | None:
        """The row of a position, None if the lane does not have it."""
        positions = self._values.get("pos", np.zeros(0))
        row = bisect_left(positions, pos)
        return row if row < self._n and positions[row] == pos else None

    def pos_of(self, row: int) -> int:
        """The position in a row."""
        return int(self._values["pos"][row])

    def n_rows(self) -> int:
        return self._n

    def cell(self, row: int, name: str, role: int) -> Any:
        if role == _DISPLAY:
            return self._text(name, row)
        if role == _FOREGROUND:
            return self.beyond_colour if self._is_beyond(row) else None
        if role == Qt.ItemDataRole.ToolTipRole:
            value = self._values[name][row] if name not in _TEXT else None
            return f"{value:.9g}" if isinstance(value, float) else None
        return None

    def _take_values(self) -> None:
        lanes = self._lanes
        names = _NAMES if lanes is not None else ()
        self._values = {
            name: lanes.values(self._run_id, name) for name in names if lanes is not None
        }
        bound = lanes.bounds.get(self._run_id, 0.0) if lanes is not None else 0.0
        if bound != self._bound and self._n:
            last = self.index(self._n - 1, len(_COLUMNS) - 1)
            self.dataChanged.emit(self.index(0, 0), last)
        self._bound = bound

    def _is_beyond(self, row: int) -> bool:
        return not self._values["nmse"][row] <= self._bound

    def _text(self, name: str, row: int) -> str:
        if name == "":
            if self._is_beyond(row):
                return "✗ beyond bound"
            return "exact" if self._values["nmse"][row] == 0 else "within bound"
        value = self._values[name][row]
        if name == "token_id":
            return self._lanes.text(int(value)) if self._lanes is not None else ""
        if value == MISSING:
            return NOT_OBSERVED
        if name == "top1_equal":
            return "same" if value else "≠ other"
        if name in ("pos", "round", "rank", "cells_differ"):
            return f"{int(value):,}"
        if name in ("state_error", "conv_error") and np.isnan(value):
            return ""  # measured after the last token of a round only
        return error_text(float(value))
