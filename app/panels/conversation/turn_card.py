"""One turn of a conversation: what was said, what was answered, what it took from memory."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.looks.theme import Theme, fixed_font
from engine.conversation.turns import Turn, TurnTree, content_of
from engine.trace.prompt_reuse import processed_lines, reused_text
from engine.trace.records import EMITTED_KINDS
from engine.trace.store import TraceStore

_GAP = 4
"""Pixels between the answer and the facts about it."""


class TurnCard(QFrame):
    """A card that is filled by `show_turn` and `set_answer`."""

    edit_asked = Signal()
    branch_asked = Signal()
    run_asked = Signal()
    sibling_asked = Signal(int)
    """The turn before (-1) or after (+1) this one among those that follow the same turn."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.title = QLabel()
        font = self.title.font()
        font.setBold(True)
        self.title.setFont(font)
        self.earlier = _button("‹", "The earlier version of this turn")
        self.later = _button("›", "The later version of this turn")
        self.place = QLabel()
        self.edit = _button("Edit", "Say something else in place of this turn, as a branch")
        self.branch = _button("Branch", "Continue from this turn with another one")
        self.run = _button("Show run", "Show this turn's run in all panels")
        self.said, self.answer, self.facts = QLabel(), QLabel(), QLabel()
        for label in (self.title, self.place, self.said, self.answer, self.facts):
            label.setTextFormat(Qt.TextFormat.PlainText)
        for label in (self.said, self.answer, self.facts):
            label.setWordWrap(True)
            label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        for label in (self.said, self.answer):
            label.setFont(fixed_font())
        self.facts.setForegroundRole(self.facts.palette().ColorRole.PlaceholderText)
        self._lay_out()
        self._connect()
        self.retheme(theme)

    def show_turn(self, title: str, said: str, facts: list[str], place: str) -> None:
        """title: which turn; place: which of several versions, empty for a single one."""
        self.title.setText(title)
        self.said.setText(said)
        self.facts.setText("\n".join(facts))
        self.place.setText(place)
        for widget in (self.earlier, self.place, self.later):
            widget.setVisible(bool(place))
        self.setAccessibleName(title)

    def set_answer(self, text: str) -> None:
        """The answer as it is so far."""
        self.answer.setText(text)
        self.answer.setVisible(bool(text))

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        edge, panel, tint = (
            theme.color(role).name() for role in ("ui.border", "ui.panel", "ui.raised")
        )
        self.setStyleSheet(
            f"TurnCard {{ background: {panel}; border: 1px solid {edge}; border-radius: 4px; }}"
        )
        self.said.setStyleSheet(f"background: {tint}; padding: 4px; border-radius: 3px;")

    def _lay_out(self) -> None:
        # as narrow as its panel: what is long wraps
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        top = QHBoxLayout()
        top.setSpacing(4)
        for widget in (self.title, self.earlier, self.place, self.later):
            top.addWidget(widget)
        top.addStretch(1)
        for button in (self.edit, self.branch, self.run):
            top.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 6, 8, 6)
        column.setSpacing(4)
        column.addLayout(top)
        for label in (self.said, self.answer, self.facts):
            column.addWidget(label)
        self.facts.setContentsMargins(0, _GAP, 0, 0)

    def _connect(self) -> None:
        self.edit.clicked.connect(self.edit_asked)
        self.branch.clicked.connect(self.branch_asked)
        self.run.clicked.connect(self.run_asked)
        self.earlier.clicked.connect(lambda: self.sibling_asked.emit(-1))
        self.later.clicked.connect(lambda: self.sibling_asked.emit(+1))


def _button(text: str, tip: str) -> QToolButton:
    button = QToolButton()
    button.setText(text)
    button.setToolTip(tip)
    button.setAccessibleName(tip)
    button.setAutoRaise(True)
    return button


_LONGEST_TEXT = 6000


def answer_text(store: TraceStore, turn: Turn) -> str:
    """The answer as it is so far."""
    if turn.answer is not None:
        return shown_text(content_of(turn.answer))
    tokens, n = store.tokens, len(store.tokens)
    mine = tokens.column("run_id", 0, n) == turn.run_id
    if not mine.any():
        return ""
    first = int(mine.argmax())
    kinds = tokens.texts("kind", first, n)
    ids = tokens.column("token_id", first, n).tolist()
    pieces = (
        store.pieces.get(token, b"")
        for token, kind, is_mine in zip(ids, kinds, mine[first:].tolist(), strict=True)
        if is_mine and kind in EMITTED_KINDS
    )
    return shown_text(b"".join(pieces).decode("utf-8", "replace"))


def said_text(turn: Turn) -> str:
    """What the messages say; with roles where there is another than the user's."""
    if all(message.get("role") == "user" for message in turn.messages):
        return shown_text(turn.text)
    return shown_text(
        "\n".join(f"{message.get('role')}: {content_of(message)}" for message in turn.messages)
    )


def shown_text(text: str) -> str:
    """A text as long as a card can hold."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters)"


def fact_lines(turn: Turn) -> list[str]:
    """What a turn took from memory, what it processed and why."""
    record = turn.record
    if record is None:
        return ["not measured what was reused"]
    lines = [reused_text(record), *processed_lines(record)]
    if turn.rewritten_at is not None:
        lines.append(
            f"the history reads differently from token {turn.rewritten_at:,} on than it was "
            "written (end token, chat template or tokeniser)"
        )
    return lines


def leaf_of(tree: TurnTree, chosen: int | None) -> int | None:
    """The turn to show up to: the chosen one, else the newest, None without any."""
    if chosen in tree.turns:
        return chosen
    return max(tree.turns, default=None)
