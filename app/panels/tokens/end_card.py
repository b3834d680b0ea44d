"""The card below a text that has ended: why it did, how it went, and the next step worth taking."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QPalette, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QToolButton, QVBoxLayout

from app.panels.tokens.run_end import COMPARE, FINDING, TUNE, NextStep, RunEnd
from app.trace_models.number_text import significant
from app.trace_models.plain_tip import plain_tip

_STEPS = {
    FINDING: ("Show finding", "Bring the findings into sight, and the round"),
    TUNE: ("Tune", "Estimate the speed under other settings from this run"),
    COMPARE: ("Compare", "Decode the prompt in several lanes and show where they come apart"),
}
_WHY_CHARACTERS, _BOTH_CHARACTERS = 44, 60
"""Across from which there is room for the sentence, and for both buttons on a single line."""
_MOST_CHARACTERS = 100
"""Of a text in a wide window, whose button would stand far from what it is about."""


class EndCard(QFrame):
    """Hidden while nothing has ended, and once the user has closed it."""

    plain_asked = Signal()
    """The plain run of the same prompt is to be measured."""
    step_asked = Signal(object)  # NextStep

    def __init__(self) -> None:
        super().__init__()
        self._end: RunEnd | None = None
        self._low = self._offers_plain = False
        self.setObjectName("tokens.end_card")
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.setAutoFillBackground(True)
        self.setBackgroundRole(QPalette.ColorRole.AlternateBase)
        self.reason, self.figures, self.audit, self.why = (_text() for _ in range(4))
        bold = self.reason.font()
        bold.setBold(True)
        self.reason.setFont(bold)
        self.why.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        self.plain = QPushButton("Measure plain")
        self.plain.setToolTip("Run the same prompt without drafts, and come back to this run")
        self.plain.clicked.connect(self.plain_asked)
        self.step = QPushButton(_STEPS[COMPARE][0])
        self.step.clicked.connect(self._take_step)
        self._close = QToolButton()
        self._close.setText("✕")
        self._close.setAutoRaise(True)
        self._close.setToolTip("Close")
        self._close.setAccessibleName("Close this card")
        self._close.clicked.connect(self.hide)
        self._head, self._measured, self._next = QHBoxLayout(), QHBoxLayout(), QHBoxLayout()
        self._head.addWidget(self.reason, 1)
        self._head.addStretch()
        self._head.addWidget(self._close, 0, Qt.AlignmentFlag.AlignTop)
        self._measured.addWidget(self.figures, 1)
        self._measured.addWidget(self.plain)
        self._measured.addStretch()
        self._next.addWidget(self.why, 1)
        self._next.addWidget(self.step)
        self._next.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(10, 4, 6, 6)
        column.setSpacing(2)
        most = _MOST_CHARACTERS * self.fontMetrics().averageCharWidth()
        for text in (self.reason, self.figures, self.audit, self.why):
            text.setMaximumWidth(most)
        for row in (self._head, self._measured, self._next):
            row.setSpacing(8)
            column.addLayout(row)
        column.insertWidget(2, self.audit)
        self.hide()

    @property
    def end(self) -> RunEnd | None:
        """What is on show."""
        return self._end

    def show_end(self, end: RunEnd | None, *, can_measure: bool, can_compare: bool) -> None:
        """Show how a run ended, or nothing. can_measure: its plain run can be made now.
        can_compare: lanes can be compared now."""
        if end is not None and end.next_step is not None:
            self.step.setEnabled(can_compare or end.next_step.kind != COMPARE)
        if end is not None and end == self._end:
            self._show_figures(end, can_measure)
            return  # and stay closed, if the user has closed it
        self._end = end
        self.setVisible(end is not None)
        if end is None:
            return
        self.reason.setText(end.reason)
        self.audit.setText(end.audit)
        self._show_figures(end, can_measure)
        step = end.next_step
        self.step.setVisible(step is not None)
        if step is not None:
            self.why.setText(step.why)
            text, tip = _STEPS[step.kind]
            self.step.setText(text)
            self.step.setToolTip(plain_tip(f"{step.why} {tip}."))
        self._fit()
        self.setAccessibleName(
            " ".join((end.reason, self.figures.text(), end.audit, step.why if step else ""))
        )

    def set_low(self, low: bool) -> None:
        """Take a single line, with the figures in the tooltip, or all that there is to say."""
        if low == self._low:
            return
        self._low = low
        if low:
            self._head.insertWidget(1, self.plain)
            self._head.insertWidget(2, self.step)
        else:
            self._measured.insertWidget(1, self.plain)
            self._next.insertWidget(1, self.step)
        self._fit()

    def minimumSizeHint(self) -> QSize:
        """On a single line there is room for one of the buttons."""
        least = super().minimumSizeHint()
        if self._low and not self.plain.isHidden() and not self.step.isHidden():
            least -= QSize(self.plain.minimumSizeHint().width() + self._head.spacing(), 0)
        return least

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        """In a narrow window the sentence of the next step is in the tooltip of its button."""
        wide = self.width() >= _WHY_CHARACTERS * self.fontMetrics().averageCharWidth()
        has_step = self._end is not None and self._end.next_step is not None
        self.why.setVisible(wide and has_step and not self._low)
        self.figures.setHidden(self._low)
        self.audit.setHidden(self._low or not self.audit.text())
        one = self._low and self.width() < _BOTH_CHARACTERS * self.fontMetrics().averageCharWidth()
        self.plain.setVisible(self._offers_plain and not (one and has_step))

    def _show_figures(self, end: RunEnd, can_measure: bool) -> None:
        """The figures, and the speed relative to plain decoding or the button that measures it."""
        figures = list(end.figures)
        if end.vs_plain is not None:
            figures.append(f"{significant(end.vs_plain)}× plain decoding")
        self.figures.setText(" · ".join(figures))
        self.reason.setToolTip(plain_tip("\n".join(filter(None, (self.figures.text(), end.audit)))))
        self._offers_plain = can_measure and end.vs_plain is None and not end.is_plain
        self._fit()

    def _take_step(self) -> None:
        step: NextStep | None = self._end.next_step if self._end is not None else None
        if step is not None:
            self.step_asked.emit(step)


def _text() -> QLabel:
    label = QLabel()
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
