"""The most probable tokens of both models at one position, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QColor, QFont

from app.panels.inspector.step import Step, TraceRow
from app.panels.inspector.step_table import FORBIDDEN
from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.number_text import probability_text
from app.trace_models.position_detail import BAR_ROLE, DIFFERS_ROLE

_COLUMNS = (
    TableColumn("token", "token", "The target's order first", True),
    TableColumn("q", "draft q", "The drafter's probability; a dash: not among those recorded"),
    TableColumn(
        "p", "target p", "The target's raw softmax probability; a dash: not among those recorded"
    ),
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token and what each side gave it; None: not among its most probable ones. is_forbidden:
    the grammar does not allow it here."""

    token_id: int
    q: float | None
    p: float | None
    is_forbidden: bool = False


def alternatives(token: TraceRow) -> list[Alternative]:
    """The union of both sides: the target's tokens by p, then the drafter's others by q."""
    p = _tops(token, "target")
    q = _tops(token, "draft")
    others = sorted((i for i in q if i not in p), key=lambda i: -q[i])
    forbidden = _forbidden(token, "target") | _forbidden(token, "draft")
    return [
        Alternative(i, q.get(i), p.get(i), i in forbidden)
        for i in (*sorted(p, key=lambda i: -p[i]), *others)
    ]


def _tops(token: TraceRow, side: str) -> dict[int, float]:
    pairs = zip(token[f"{side}_top_id"], token[f"{side}_top_p"], strict=True)
    return {i: p for i, p in pairs if i is not None and p is not None}


def _forbidden(token: TraceRow, side: str) -> set[int]:
    pairs = zip(token[f"{side}_top_id"], token[f"{side}_top_forbidden"], strict=True)
    return {i for i, flag in pairs if flag}


class TopTable(ColumnTable):
    """`alternatives` of one token; the token of the row chosen is bold, what the grammar forbids
    has a mark and is muted."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(_COLUMNS, parent)
        self.muted_colour = QColor()
        self.rows: list[Alternative] = []
        self._step: Step | None = None
        self._token_id: int | None = None

    def show_token(self, step: Step | None, row: int) -> None:
        """Show the alternatives of a row of `Step.tokens`, or nothing."""
        self.beginResetModel()
        self._step, self.rows, self._token_id = step, [], None
        if step is not None and 0 <= row < len(step.tokens):
            token = step.tokens[row]
            self.rows, self._token_id = alternatives(token), token["token_id"]
        self.endResetModel()

    def n_rows(self) -> int:
        return len(self.rows)

    def cell(self, row: int, name: str, role: int) -> Any:
        if self._step is None:
            return None
        one = self.rows[row]
        if name == "token":
            return self._token_cell(self._step, one, role)
        value = one.q if name == "q" else one.p
        if role == Qt.ItemDataRole.DisplayRole:
            return probability_text(value)
        if role == BAR_ROLE:
            return value
        if role == DIFFERS_ROLE:
            return name == "q"  # the draft's bars in the other colour
        if role == Qt.ItemDataRole.ToolTipRole:
            return None if value is None else f"{value:.9g}"
        if role == Qt.ItemDataRole.ForegroundRole and value is None:
            return self.muted_colour
        return None

    def _token_cell(self, step: Step, one: Alternative, role: int) -> Any:
        if role == Qt.ItemDataRole.DisplayRole:
            text = step.text(one.token_id)
            return f"{FORBIDDEN} {text}" if one.is_forbidden else text
        if role == Qt.ItemDataRole.ToolTipRole:
            why = ": the grammar does not allow it here" if one.is_forbidden else ""
            return f"token {one.token_id}{why}"
        if role == Qt.ItemDataRole.ForegroundRole and one.is_forbidden:
            return self.muted_colour
        if role == Qt.ItemDataRole.FontRole and one.token_id == self._token_id:
            font = QFont()
            font.setBold(True)
            return font
        return None
