"""Tables of a round: the judged tokens (draft and target probabilities), and the most probable
tokens of both models at one position."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt

from app.looks import Theme
from app.panels.inspector.step_facts import Step, TraceRow
from app.trace_models.run_rows import Position
from app.trace_models.shown_text import NOT_OBSERVED, probability_text
from app.widgets.plain_table import BAR_COLOUR_ROLE, BAR_ROLE, ColumnTable, TableColumn, bold
from engine.trace.token_text import MEANING

COLUMNS = (
    TableColumn("pos", "pos", "Position of the token, also if it was not accepted"),
    TableColumn("token", "token", "Drafted token, or the target's own", True),
    TableColumn("decision", "decision", "Outcome", True),
    TableColumn("draft_p", "q", "Drafter's confidence in the drafted token"),
    TableColumn("draft_conf", "conf", "Output of the drafter's confidence head for the token"),
    TableColumn("target_p", "p", "The target's probability of the token in this row"),
    TableColumn("target_rank", "rank", "Rank of the token among the target's logits, from 1"),
    TableColumn("target", "argmax", "The target's most probable token here", True),
    TableColumn("target_best", "its p", "Probability of the target's most probable token"),
    TableColumn("target_entropy", "H, nats", "Entropy of the target's softmax here"),
    TableColumn(
        "rule_p", "rule p", "Target's probability after bias, penalties, filters and temperature"
    ),
    TableColumn("rule_q", "rule q", "Drafter's probability in rejection sampling; none with match"),
)
SELDOM = ("draft_conf",)
"""Columns of few drafters: hidden if no token of a round has a value."""
SIGNS = {
    "accepted": "✓",
    "rejected": "✗",
    "ignored": "·",
    "side": "¦",
    "replacement": "↻",
    "bonus": "+",
    "target": "→",
    "unknown": "?",
}
FORBIDDEN = "⊘"
"""Prefix of a token that the grammar does not allow there."""


def cell_text(step: Step, token: TraceRow, name: str) -> str:
    """One cell as text; empty if the figure is not meaningful for the token."""
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
        is_own &= token["kind"] != "side"
        return "" if is_own or name in SELDOM else NOT_OBSERVED
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if name == "target_entropy" else probability_text(value)


def figure(token: TraceRow, name: str) -> Any:
    """The unrounded value of a cell; None if not observed, or not a number."""
    return token["target_top_p"][0] if name == "target_best" else token.get(name)


def default_row(step: Step) -> int:
    """The row of interest: the rejection, else the last token; -1 without any row."""
    kinds = [token["kind"] for token in step.tokens]
    return kinds.index("rejected") if "rejected" in kinds else len(kinds) - 1


class StepTable(ColumnTable):
    """`Step.tokens`, a row each."""

    columns = COLUMNS
    step: Step | None = None

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        theme.changed.connect(self.layoutChanged)

    def show_step(self, step: Step | None) -> None:
        self.step = step
        self.show_rows(() if step is None else step.tokens)

    def row_of(self, position: Position | None) -> int:
        """The row of a token, or the first at a position; else the default row."""
        if self.step is None:
            return -1
        there = (i for i in range(len(self.step.tokens)) if self.stands_at(i, position))
        return next(there, default_row(self.step))

    def stands_at(self, row: int, position: Position | None) -> bool:
        """Whether a row is at a position, or the token that it names."""
        if self.step is None or position is None or not 0 <= row < len(self.step.tokens):
            return False
        if position.row is not None:
            return self.step.token_rows[row] == position.row
        return bool(self.step.tokens[row]["pos"] == position.pos)

    def empty_columns(self) -> list[int]:
        """Columns of SELDOM without values."""
        tokens = self.step.tokens if self.step else ()
        return [
            i
            for i, column in enumerate(COLUMNS)
            if column.name in SELDOM and all(one[column.name] is None for one in tokens)
        ]

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


_COLUMNS = (
    TableColumn("token", "token", "Ordered by the target, then the drafter", True),
    TableColumn("q", "draft q", "The drafter's probability; –: not recorded"),
    TableColumn("p", "target p", "The target's softmax probability; –: not recorded"),
)


Alternative = tuple[int, float | None, float | None, bool]
"""A token, the drafter's q and the target's p of it, None if not among the most probable ones, and
whether the grammar forbids it here."""


def alternatives(token: TraceRow) -> list[Alternative]:
    """The union of both lists: the target's tokens by p, then the drafter's others by q. The token
    itself has the p that it was judged by, even if others were recorded as more probable."""
    p = _tops(token, "target")
    q = _tops(token, "draft")
    if token["target_p"] is not None:
        p.setdefault(token["token_id"], token["target_p"])
    others = sorted((i for i in q if i not in p), key=lambda i: -q[i])
    forbidden = _forbidden(token, "target") | _forbidden(token, "draft")
    return [
        (i, q.get(i), p.get(i), i in forbidden) for i in (*sorted(p, key=lambda i: -p[i]), *others)
    ]


def _tops(token: TraceRow, side: str) -> dict[int, float]:
    pairs = zip(token[f"{side}_top_id"], token[f"{side}_top_p"], strict=True)
    return {i: p for i, p in pairs if i is not None and p is not None}


def _forbidden(token: TraceRow, side: str) -> set[int]:
    pairs = zip(token[f"{side}_top_id"], token[f"{side}_top_forbidden"], strict=True)
    return {i for i, flag in pairs if flag}


class TopTable(ColumnTable):
    """`alternatives` of one token; the chosen row's token is bold, forbidden ones are marked and
    muted."""

    columns = _COLUMNS
    _step: Step | None = None
    _token_id: int | None = None

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme

    def show_token(self, step: Step | None, row: int) -> None:
        """Show the alternatives of a row of `Step.tokens`, or nothing."""
        self._step = step
        token = step.tokens[row] if step and 0 <= row < len(step.tokens) else None
        self._token_id = token["token_id"] if token else None
        self.show_rows(alternatives(token) if token else ())

    def cell(self, row: int, name: str, role: int) -> Any:
        if self._step is None:
            return None
        one = self.rows[row]
        if name == "token":
            return self._token_cell(self._step, one, role)
        value = one[1] if name == "q" else one[2]
        if role == Qt.ItemDataRole.DisplayRole:
            return probability_text(value)
        if role == BAR_ROLE:
            return value
        if role == BAR_COLOUR_ROLE:
            return self._theme.color("rejected.line" if name == "q" else "accepted.line")
        if role == Qt.ItemDataRole.ToolTipRole:
            return None if value is None else f"{value:.9g}"
        if role == Qt.ItemDataRole.ForegroundRole and value is None:
            return self._theme.color("ui.muted")
        return None

    def _token_cell(self, step: Step, one: Alternative, role: int) -> Any:
        token_id, _, _, is_forbidden = one
        if role == Qt.ItemDataRole.DisplayRole:
            text = step.text(token_id)
            return f"{FORBIDDEN} {text}" if is_forbidden else text
        if role == Qt.ItemDataRole.ToolTipRole:
            why = ": the grammar does not allow it here" if is_forbidden else ""
            return f"token {token_id}{why}"
        if role == Qt.ItemDataRole.ForegroundRole and is_forbidden:
            return self._theme.color("ui.muted")
        if role == Qt.ItemDataRole.FontRole and token_id == self._token_id:
            return bold()
        return None
