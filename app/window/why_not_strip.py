"""One quiet line that says why a run does not speculate, or not as asked."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QToolButton, QWidget

from app.looks.pacer import Pacer
from app.looks.theme import Theme, icon
from app.trace_models.plain_tip import plain_tip
from app.trace_models.position import Position
from app.window.why_not import WhyNotReason, why_not
from engine.trace.run_ref import RunRef

_PERIOD_MS = 500
_ICON = 14


class WhyNotStrip(QFrame):
    """The reason on show, a button that goes to its round, and one for the next reason.

    Without a reason it takes no room, and neither does it after it is dismissed, until there is
    a reason that was not among those dismissed, or another run is on show.
    """

    position_selected = Signal(object)  # Position

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._run: RunRef | None = None
        self._sizes = (-1, -1)
        self._at = 0
        self._dismissed: set[str] = set()
        self.reasons: list[WhyNotReason] = []
        self._pacer = Pacer(self._read, _PERIOD_MS, self)
        self._icon = QLabel()
        self.text = QLabel()
        self.text.setTextFormat(Qt.TextFormat.PlainText)
        self.text.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.show_button, self.next_button = QToolButton(), QToolButton()
        self.show_button.setText("Show")
        self.show_button.setToolTip("Go to the round where it happened first")
        self.show_button.clicked.connect(self._go)
        self.next_button.setToolTip("Show the next reason")
        self.next_button.setAccessibleName("Next reason")
        self.next_button.clicked.connect(lambda: self._show(self._at + 1))
        self.close_button = QToolButton()
        self.close_button.setToolTip("Hide this line until there is another reason")
        self.close_button.setAccessibleName("Dismiss the reasons")
        self.close_button.clicked.connect(self._dismiss)
        self._row = row = QHBoxLayout(self)
        row.setContentsMargins(10, 1, 4, 1)
        row.setSpacing(6)
        row.addWidget(self._icon)
        row.addWidget(self.text, 1)
        for button in (self.show_button, self.next_button, self.close_button):
            button.setAutoRaise(True)
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            row.addWidget(button)
        self.hide()

    def show_run(self, run: RunRef | None) -> None:
        """Explain a run, or nothing."""
        self._pacer.stop()
        if run != self._run:
            self._dismissed = set()
        self._run = run
        self._sizes, self._at = (-1, -1), 0
        self._read()

    def refresh(self) -> None:
        """Work the reasons out again, a little later, if the trace has grown since."""
        if self._run is not None and self._sizes_now(self._run) != self._sizes:
            self._pacer.ask()

    def set_cursor(self, _position: Position | None) -> None:
        """The reasons are about the run, wherever the cursor is."""

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self._theme = theme
        self._show(self._at)

    def _read(self) -> None:
        run = self._run
        reasons: list[WhyNotReason] = []
        if run is not None:
            self._sizes = self._sizes_now(run)
            reasons = why_not(run.store, run.run_id)
        if reasons != self.reasons:
            self.reasons = reasons
            self._show(self._at)

    @staticmethod
    def _sizes_now(run: RunRef) -> tuple[int, int]:
        return len(run.store.rounds), len(run.store.drafts)

    def _show(self, at: int) -> None:
        n = len(self.reasons)
        news = any(reason.topic not in self._dismissed for reason in self.reasons)
        self.setVisible(news)
        if not news:
            return
        self._at = at % n
        reason = self.reasons[self._at]
        drawing = icon(reason.severity, self._theme, f"status.{reason.severity}")
        self._icon.setPixmap(drawing.pixmap(QSize(_ICON, _ICON), self.devicePixelRatioF()))
        self.close_button.setIcon(icon("close", self._theme))
        self.text.setToolTip(plain_tip("\n".join(one.sentence for one in self.reasons)))
        self.setAccessibleName(f"{reason.severity}: {reason.sentence}")
        self.show_button.setVisible(reason.place is not None)
        self.next_button.setVisible(n > 1)
        self.next_button.setText(f"{self._at + 1} of {n}")
        self._elide()
        self.update()

    def _dismiss(self) -> None:
        self._dismissed = {reason.topic for reason in self.reasons}
        self.hide()

    def _go(self) -> None:
        place = self.reasons[self._at].place
        if place is not None and self._run is not None:
            seq_id, round_ = place
            self.position_selected.emit(Position(self._run, seq_id, round_, None))

    def _elide(self) -> None:
        if self.reasons:
            sentence = self.reasons[self._at].sentence
            room = max(self.text.width(), 1)
            self.text.setText(
                self.fontMetrics().elidedText(sentence, Qt.TextElideMode.ElideRight, room)
            )

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._row.activate()
        self._elide()

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self._theme.color("ui.raised"))
        painter.fillRect(0, 0, self.width(), 1, self._theme.color("ui.border"))
        painter.end()
