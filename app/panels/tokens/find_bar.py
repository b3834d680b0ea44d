"""The line above the token streams in which a reader asks for tokens."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QPalette
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QToolButton, QVBoxLayout, QWidget

from app.looks.theme import Theme, icon
from app.panels.tokens.token_filter import CHOICES, FIELDS, FilterError, Term, parse_filter
from engine.trace.records import TOKEN_KINDS

_EXAMPLES = "rejected   depth>2   path:restore   seq:1   p<0.1   text"
_HELP = (
    f"Kinds: {', '.join(TOKEN_KINDS)}\nFigures: {', '.join(FIELDS)}\n"
    f"Choices: {', '.join(f'{name}:' for name in CHOICES)}\n"
    "Anything else is text, and so is anything in double quotes."
)


class FindBar(QWidget):
    """A query, the number of hits, and what is wrong with the query if it means nothing."""

    query_changed = Signal(object)  # tuple[Term, ...]
    step_asked = Signal(int)
    closed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.line = QLineEdit()
        self.line.setPlaceholderText(_EXAMPLES)
        self.line.setAccessibleName("Find tokens")
        self.line.setToolTip(_HELP)
        self.line.textChanged.connect(self._on_text)
        self.count = QLabel()
        self.count.setAccessibleName("Hits")
        self.error = QLabel()
        self.error.setTextFormat(Qt.TextFormat.PlainText)
        self.error.setWordWrap(True)
        self.error.setAccessibleName("What is wrong with the query")
        self.error.hide()
        self.previous_button, self.next_button, self.close_button = (
            QToolButton(),
            QToolButton(),
            QToolButton(),
        )
        row = QHBoxLayout()
        row.setSpacing(4)
        row.addWidget(self.line, 1)
        row.addWidget(self.count)
        for button, tip in (
            (self.previous_button, "Previous hit (Shift+Enter)"),
            (self.next_button, "Next hit (Enter)"),
            (self.close_button, "Close (Esc)"),
        ):
            button.setAutoRaise(True)
            button.setToolTip(tip)
            button.setAccessibleName(tip.partition(" (")[0])
            row.addWidget(button)
        self.previous_button.clicked.connect(lambda: self.step_asked.emit(-1))
        self.next_button.clicked.connect(lambda: self.step_asked.emit(+1))
        self.close_button.clicked.connect(self.closed)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 4, 4, 2)
        column.setSpacing(2)
        column.addLayout(row)
        column.addWidget(self.error)
        self.show_count(0, None)
        self.retheme(theme)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the query; empty while it has an error."""
        try:
            return parse_filter(self.line.text())
        except FilterError:
            return ()

    def begin(self) -> None:
        """Ready for typing."""
        self.line.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.line.selectAll()

    def show_count(self, n: int, at: int | None) -> None:
        """Say how many hits there are, and which of them (from 0) the cursor is at."""
        if not self.terms:
            text = ""
        elif not n:
            text = "no hits"
        else:
            hits = "hit" if n == 1 else "hits"
            text = f"{n:,} {hits}" if at is None else f"{at + 1:,} of {n:,}"
        self.count.setText(text)
        self.previous_button.setEnabled(n > 0)
        self.next_button.setEnabled(n > 0)

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        for button, name in (
            (self.previous_button, "go-previous"),
            (self.next_button, "go-next"),
            (self.close_button, "close"),
        ):
            button.setIcon(icon(name, theme))
        palette = self.error.palette()
        palette.setColor(QPalette.ColorRole.WindowText, theme.color("status.error"))
        self.error.setPalette(palette)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            back = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
            self.step_asked.emit(-1 if back else +1)
        elif event.key() == Qt.Key.Key_Escape:
            self.closed.emit()
        else:
            super().keyPressEvent(event)

    def _on_text(self, text: str) -> None:
        try:
            terms, error = parse_filter(text), ""
        except FilterError as wrong:
            terms, error = (), str(wrong)
        self.error.setText(error)
        self.error.setVisible(bool(error))
        self.query_changed.emit(terms)
