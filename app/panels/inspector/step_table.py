"""The judged tokens of a round as a table: what the draft said, what the target had."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QObject, Qt

from app.looks.theme import Theme
from app.panels.inspector.step import Step, TraceRow
from app.trace_models.column_table import ColumnTable, TableColumn
from app.trace_models.number_text import NOT_OBSERVED
from app.trace_models.token_text import MEANING

COLUMNS = (
    TableColumn("pos", "pos", "Position that the token has, or would have had"),
    TableColumn("token", "token", "Token that was drafted, or that the target chose itself", True),
    TableColumn("decision", "decision", "What became of it", True),
    TableColumn("draft_p", "q", "Drafter's confidence in the drafted token"),
    TableColumn("draft_conf", "conf", "What the drafter's confidence head gave the token"),
    TableColumn("target_p", "p", "The target's probability of the token in this row"),
    TableColumn("target_rank", "rank", "Rank of the token among the target's logits, from 1"),
    TableColumn("target", "argmax", "The target's most probable token here", True),
    TableColumn("target_best", "its p", "Probability of the target's most probable token"),
    TableColumn("target_entropy", "H, nats", "Entropy of the target's softmax here"),
    TableColumn(
        "rule_p", "rule p", "Target's probability after bias, penalties, filters and temperature"
    ),
    TableColumn("rule_q", "rule q", "Drafter's probability as rejection used it; match uses none"),
)
SELDOM = ("draft_conf",)
"""Columns of few drafters: not shown where no token of a round has the figure."""
SIGNS = {
    "accepted": "✓",
    "rejected": "✗",
    "ignored": "·",
    "replacement": "↻",
    "bonus": "+",
    "target": "→",
    "unknown": "?",
}
FORBIDDEN = "⊘"
"""Before a token that the grammar does not allow at its place."""
_DIGITS = {"target_entropy": 2}


def cell_text(step: Step, token: TraceRow, name: str) -> str:
    """One cell as text; empty where a figure has no meaning for the token."""
    if name == "token":
        return step.text_of(token)
    if name == "decision":
        return f"{SIGNS.get(token['kind'], '')} {token['kind']}".strip()
    if name == "target":
        best = token["target_top_id"][0]
        if best is None:
            return NOT_OBSERVED
        mark = f"{FORBIDDEN} " if token["target_top_forbidden"][0] else ""
        return f"{mark}{step.text(best)}"
    value = figure(token, name)
    if value is None:
        is_own = token["draft_index"] is None and name in ("draft_p", "rule_q")
        return "" if is_own or name in SELDOM else NOT_OBSERVED
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{_DIGITS.get(name, 3)}f}"


def figure(token: TraceRow, name: str) -> Any:
    """The unrounded value of a cell; None if not observed, or if the cell holds no number."""
    return token["target_top_p"][0] if name == "target_best" else token.get(name)


def default_row(step: Step) -> int:
    """The row worth a look first: the rejection, else the last token; -1 without any row."""
    kinds = [token["kind"] for token in step.tokens]
    return kinds.index("rejected") if "rejected" in kinds else len(kinds) - 1


class StepTable(ColumnTable):
    """`Step.tokens`, a row each."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(COLUMNS, parent)
        self.step: Step | None = None
        self._theme = theme

    def show_step(self, step: Step | None) -> None:
        """Show another round, or nothing."""
        self.beginResetModel()
        self.step = step
        self.endResetModel()

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self.layoutChanged.emit()

    def row_of(self, pos: int | None) -> int:
        """The row at a position, the draft's before its replacement; else the default row."""
        if self.step is None:
            return -1
        there = (i for i, one in enumerate(self.step.tokens) if one["pos"] == pos)
        return next(there, default_row(self.step))

    def stands_at(self, row: int, pos: int | None) -> bool:
        """Whether a row is that of a position."""
        if self.step is None or not 0 <= row < len(self.step.tokens):
            return False
        return bool(self.step.tokens[row]["pos"] == pos)

    def empty_columns(self) -> list[int]:
        """Columns of SELDOM in which there is nothing."""
        tokens = self.step.tokens if self.step else ()
        return [
            i
            for i, column in enumerate(COLUMNS)
            if column.name in SELDOM and all(one[column.name] is None for one in tokens)
        ]

    def n_rows(self) -> int:
        return 0 if self.step is None else len(self.step.tokens)

    def cell(self, row: int, name: str, role: int) -> Any:
        if self.step is None:
            return None
        token = self.step.tokens[row]
        if role == Qt.ItemDataRole.DisplayRole:
            return cell_text(self.step, token, name)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._colour(token, name)
        if role == Qt.ItemDataRole.ToolTipRole:
            if name == "decision":
                return MEANING[token["kind"]]
            if name == "target" and token["target_top_forbidden"][0]:
                return "The grammar does not allow it here"
            value = figure(token, name)
            return f"{value:.9g}" if isinstance(value, float) else None
        return None

    def _colour(self, token: TraceRow, name: str) -> Any:
        if name in ("token", "decision"):
            kind = token["kind"]
            role = f"{kind}.line"
            return self._theme.color(role if role in self._theme.roles else f"{kind}.text")
        best = token["target_top_id"][0]
        if name in ("target", "target_best") and best not in (None, token["token_id"]):
            return self._theme.color("replacement.line")
        return None
