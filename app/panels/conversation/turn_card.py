"""Turns of a conversation: a card for each (message, answer, what it reused from memory), and a
strip of the context checkpoints over its prompt."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPalette, QPen, QPolygonF
from PySide6.QtWidgets import QFrame, QSizePolicy, QToolButton

from app.looks import Theme, fixed_font
from app.widgets.build import TipWidget, flat_button, hbox, vbox, words
from engine.conversation.turns import CheckpointHistory, CheckpointMark, Turn, TurnTree, content_of
from engine.plain_text import counted, size_text
from engine.trace.prompt_reuse import PromptReuseRecord, processed_lines, reused_text
from engine.trace.records import EMITTED_KINDS
from engine.trace.store import TraceStore

_GAP = 4
"""Pixels between the answer and its facts."""


class TurnCard(QFrame):
    """A card that is filled by `show_turn` and `set_answer`."""

    edit_asked = Signal()
    branch_asked = Signal()
    run_asked = Signal()
    sibling_asked = Signal(int)
    """Asks for the previous (-1) or next (+1) turn with the same parent."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.title = words(wraps=False, bold=True)
        step = self.sibling_asked.emit
        self.earlier = _button("‹", "The earlier version of this turn", lambda: step(-1))
        self.later = _button("›", "The later version of this turn", lambda: step(+1))
        self.place = words(wraps=False)
        instead = "Replace this turn by another message, as a branch"
        self.edit = _button("Edit", instead, self.edit_asked)
        self.branch = _button(
            "Branch", "Continue from this turn with a new message", self.branch_asked
        )
        self.run = _button("Show run", "Show this turn's run in all panels", self.run_asked)
        self.said, self.answer = (words(selectable=True, font=fixed_font()) for _ in range(2))
        self.facts = words(selectable=True, muted=True)
        self._lay_out()
        self._theme = theme
        theme.apply(self._recolour)

    def show_turn(self, title: str, said: str, facts: list[str], place: str) -> None:
        """title: which turn; place: which of several versions, empty if there is one."""
        self.title.setText(title)
        self.said.setText(said)
        self.facts.setText("\n".join(facts))
        self.place.setText(place)
        for widget in (self.earlier, self.place, self.later):
            widget.setVisible(bool(place))
        self.setAccessibleName(title)

    def set_answer(self, text: str) -> None:
        self.answer.setText(text)
        self.answer.setVisible(bool(text))

    def _recolour(self) -> None:
        edge, panel, tint = (
            self._theme.color(role).name() for role in ("ui.border", "ui.panel", "ui.raised")
        )
        self.setStyleSheet(
            f"TurnCard {{ background: {panel}; border: 1px solid {edge}; border-radius: 4px; }}"
        )
        self.said.setStyleSheet(f"background: {tint}; padding: 4px; border-radius: 3px;")

    def _lay_out(self) -> None:
        # as narrow as its panel: long text wraps
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        which = self.title, self.earlier, self.place, self.later
        top = hbox(*which, 1, self.edit, self.branch, self.run, spacing=4)
        vbox(top, self.said, self.answer, self.facts, of=self, margins=(8, 6, 8, 6), spacing=4)
        self.facts.setContentsMargins(0, _GAP, 0, 0)


def _button(text: str, tip: str, does: object) -> QToolButton:
    return flat_button(text, tip, accessibleName=tip, clicked=does)


_LONGEST_TEXT = 6000


def answer_text(store: TraceStore, turn: Turn) -> str:
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
    """The text of the messages, with roles if there are others than the user's."""
    if all(message.get("role") == "user" for message in turn.messages):
        return shown_text(turn.text)
    return shown_text(
        "\n".join(f"{message.get('role')}: {content_of(message)}" for message in turn.messages)
    )


def shown_text(text: str) -> str:
    """A text, cut to what a card can hold."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters)"


def fact_lines(turn: Turn) -> list[str]:
    """What a turn reused from memory, what it processed and why."""
    record = turn.record
    if record is None:
        return ["reuse was not measured"]
    lines = [reused_text(record), *processed_lines(record)]
    if turn.rewritten_at is not None:
        lines.append(
            f"from token {turn.rewritten_at:,} on, the history has other tokens than were "
            "generated (end token, chat template or tokenizer)"
        )
    return lines


def leaf_of(tree: TurnTree, chosen: int | None) -> int | None:
    """The last turn to show: the chosen one, else the newest, None without any."""
    if chosen in tree.turns:
        return chosen
    return max(tree.turns, default=None)


_BAR = 10
_MARK = 5
_NEAR = 5
"""Distance from a mark within which the pointer hits it, pixels."""


class CheckpointStrip(TipWidget):
    """The prompt of one turn from left to right: reused, processed again (hatched), new; above it a
    mark for each checkpoint kept, filled if it was used; below it a cross for the latest miss."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._record: PromptReuseRecord | None = None
        self._history = CheckpointHistory()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName("Context checkpoints along the text")

    def set_turn(self, record: PromptReuseRecord | None, history: CheckpointHistory) -> None:
        self._record, self._history = record, history
        self.setAccessibleDescription(
            "; ".join(text for _, text in [*self._marks(), *self._misses()])
        )
        self.update()

    def sizeHint(self) -> QSize:
        line = self.fontMetrics().height()
        return QSize(20 * self.fontMetrics().averageCharWidth(), 2 * line + _BAR + 3 * _MARK)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.sizeHint().height())

    def tip_at(self, pos: QPoint) -> str:
        """What is under the pointer, in words: a mark, a miss, or the part of the prompt."""
        if self._record is None:
            return ""
        for n, text in [*self._marks(), *self._misses()]:
            if abs(self._x(n) - pos.x()) <= _NEAR:
                return text
        token = round(pos.x() / max(1, self.width()) * self._most)
        for part in self._record.parts:
            if part.start <= token < part.stop:
                return f"{part.start:,} to {part.stop:,} processed: {part.why.sentence}"
        if token < self._record.n_reused:
            return f"0 to {self._record.n_reused:,} reused"
        return ""

    def draw(self, painter: QPainter) -> None:
        record = self._record
        if record is None:
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        theme, line = self._theme, self.fontMetrics().height()
        top = line + 2 * _MARK
        muted = self.palette().color(QPalette.ColorRole.PlaceholderText)
        self._fill(painter, top, 0, record.n_reused, "accepted.line", Qt.BrushStyle.SolidPattern)
        for part in record.parts:
            again = part.why.is_again
            role = "rejected.line" if again else "ui.border"
            pattern = Qt.BrushStyle.BDiagPattern if again else Qt.BrushStyle.SolidPattern
            self._fill(painter, top, part.start, part.stop, role, pattern)
        free = -1.0
        for mark in self._history.held:
            x = self._x(mark.n_tokens)
            tip = QPolygonF(
                [
                    QPointF(x - _MARK, top - 2 * _MARK),
                    QPointF(x + _MARK, top - 2 * _MARK),
                    QPointF(x, top - 1),
                ]
            )
            painter.setPen(QPen(theme.color("ui.accent"), 1.2))
            painter.setBrush(theme.color("ui.accent" if mark.hits else "ui.panel"))
            painter.drawPolygon(tip)
            free = self._label(painter, f"{mark.n_tokens:,}", x, 0, free)
        painter.setPen(QPen(theme.color("rejected.line"), 1.5))
        for _, n_common, _, _ in self._history.misses[-1:]:
            x, y = self._x(n_common), top + _BAR + _MARK
            painter.drawLine(QPointF(x - 3, y - 3), QPointF(x + 3, y + 3))
            painter.drawLine(QPointF(x - 3, y + 3), QPointF(x + 3, y - 3))
        painter.setPen(muted)
        below = QRectF(0, top + _BAR + _MARK, self.width(), line)
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft, "0")
        painter.drawText(below, Qt.AlignmentFlag.AlignRight, f"{record.n_prompt:,} tokens")

    def _fill(
        self, painter: QPainter, top: int, start: int, stop: int, role: str, style: Qt.BrushStyle
    ) -> None:
        box = QRectF(self._x(start), top, max(1.0, self._x(stop) - self._x(start)), _BAR)
        colour = self._theme.color(role)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour)
        if style is not Qt.BrushStyle.SolidPattern:
            painter.setBrush(self._theme.color("rejected.tint"))
            painter.drawRect(box)
            painter.setBrush(colour)
            brush = painter.brush()
            brush.setStyle(style)
            painter.setBrush(brush)
        painter.drawRect(box)

    def _label(self, painter: QPainter, text: str, x: float, y: int, free: float) -> float:
        """Write a number over a mark where there is room; returns where the next may begin."""
        metrics = self.fontMetrics()
        wide = metrics.horizontalAdvance(text)
        left = min(max(0.0, x - wide / 2), self.width() - wide)
        if left < free:
            return free
        painter.setPen(self.palette().color(QPalette.ColorRole.WindowText))
        painter.drawText(QPointF(left, y + metrics.ascent()), text)
        return left + wide + metrics.averageCharWidth()

    @property
    def _most(self) -> int:
        return max(1, self._record.n_prompt if self._record else 1)

    def _x(self, n_tokens: int) -> float:
        return min(n_tokens, self._most) / self._most * (self.width() - 1)

    def _marks(self) -> list[tuple[int, str]]:
        return [(mark.n_tokens, _mark_text(mark)) for mark in self._history.held]

    def _misses(self) -> list[tuple[int, str]]:
        return [
            (n_common, f"miss at {n_common:,}, started at {n_reused:,}: {why.sentence}")
            for _, n_common, n_reused, why in self._history.misses[-1:]
        ]


def _mark_text(mark: CheckpointMark) -> str:
    hits = counted(mark.hits, "hit")
    size = size_text(mark.n_bytes)
    return f"context checkpoint at {mark.n_tokens:,}: {size}, {hits}, saved in run {mark.run_id}"
