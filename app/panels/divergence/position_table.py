"""One lane position by position, as a table."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from PySide6.QtCore import QModelIndex, QObject, Qt
from PySide6.QtGui import QColor

from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.compared_lanes import ComparedLanes
from app.trace_models.number_text import NOT_OBSERVED, error_text
from engine.trace.records import MISSING

_COLUMNS = (
    TableColumn("pos", "pos", "Position of the token that these logits choose"),
    TableColumn("round", "round", "Round in which they were computed"),
    TableColumn("token_id", "token", "What the reference lane chose there", True),
    TableColumn("", "verdict", "Against the bound on the NMSE", True),
    TableColumn("max_abs", "max |Δ|", "Largest difference of a logit"),
    TableColumn("nmse", "NMSE", "Mean squared difference of the logits over their mean square"),
    TableColumn("kl", "KL, nats", "KL(reference || lane)"),
    TableColumn("top1_equal", "top-1", "Whether both have the same most probable token"),
    TableColumn("rank", "rank", "Rank of the chosen token among this lane's logits, from 1"),
    TableColumn("top2_gap", "top-2 gap", "The reference's largest logit minus its second largest"),
    TableColumn("state_error", "state", "Worst layer's relative error after the round"),
    TableColumn("conv_error", "window", "The same of windows: last rows of inputs"),
    TableColumn(
        "cells_differ", "cells", "Attention cells in one lane only, or beyond one per position"
    ),
)
_TEXT = tuple(column.name for column in _COLUMNS if column.is_text)
_NAMES = tuple(column.name for column in _COLUMNS if column.name)


class PositionTable(ColumnTable):
    """Rows are positions. Those beyond the bound say so and have the colour `beyond`."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
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
        """Add the positions that are new; verdicts follow a bound that has risen."""
        self._take_values()
        n = len(self._values.get("pos", ()))
        if n > self._n:
            self.beginInsertRows(QModelIndex(), self._n, n - 1)
            self._n = n
            self.endInsertRows()

    def row_of(self, pos: int) -> int | None:
        """The row of a position, None where the lane has none."""
        positions = self._values.get("pos", np.zeros(0))
        row = bisect_left(positions, pos)
        return row if row < self._n and positions[row] == pos else None

    def pos_of(self, row: int) -> int:
        """The position in a row."""
        return int(self._values["pos"][row])

    def n_rows(self) -> int:
        return self._n

    def cell(self, row: int, name: str, role: int) -> Any:
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(name, row)
        if role == Qt.ItemDataRole.ToolTipRole:
            value = self._values[name][row] if name not in _TEXT else None
            return f"{value:.9g}" if isinstance(value, float) else None
        if role == Qt.ItemDataRole.ForegroundRole and self._is_beyond(row):
            return self.beyond_colour
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
                return "✗ beyond"
            return "exact" if self._values["nmse"][row] == 0 else "within"
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
