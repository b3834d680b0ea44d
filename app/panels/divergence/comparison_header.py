"""The header of a comparison: its lanes, the verdict on one, the editor of the next, and the choice
of a sequence.
"""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.actions.actions import Actions
from app.looks.theme import Theme
from app.panels.divergence.lane_cards import LaneCards
from app.panels.divergence.lane_editor import LaneEditor
from app.trace_models.compared_lanes import ComparedLanes, verdict_sentence
from app.trace_models.plain_tip import plain_tip
from engine.compare.lane_spec import LaneSpec

_BAR_CHARACTERS = 16


class ComparisonHeader(QWidget):
    """Cards, a sentence with the progress next to it, and the editor, which folds away."""

    lane_chosen = Signal(int)  # run_id

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.cards = LaneCards(theme)
        self.cards.lane_chosen.connect(self.lane_chosen)
        self.editor = LaneEditor(theme)
        self.sentence = QLabel()
        self.sentence.setTextFormat(Qt.TextFormat.PlainText)
        self.sentence.setWordWrap(True)
        self.sentence.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Progress of the comparison")
        self.progress.setFixedWidth(_BAR_CHARACTERS * self.fontMetrics().averageCharWidth())
        self.progress.setMaximumHeight(self.fontMetrics().height())
        self.edit_button = QToolButton()
        self.edit_button.setText("&Lanes")
        self.edit_button.setToolTip("Choose the lanes of the next comparison")
        self.edit_button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.edit_button.setCheckable(True)
        self.edit_button.toggled.connect(self.editor.setVisible)
        self._lay_out()
        self.set_editing(True)
        for part in (self.sentence, self.progress):
            part.hide()  # there is no comparison yet

    def chosen_lanes(self) -> tuple[LaneSpec, ...] | None:
        """The lanes of the next comparison; None, and the text in sight, if one is wrong."""
        lanes = self.editor.lanes()
        self.set_editing(lanes is None)
        if lanes is None:
            self.editor.text.setFocus()
        return lanes

    def set_editing(self, editing: bool) -> None:
        """Unfold the editor or fold it away."""
        self.edit_button.setChecked(editing)

    def set_lanes(self, lanes: ComparedLanes | None) -> None:
        """Show the lanes of another comparison, or none; the editor is open where there is none."""
        self.cards.set_lanes(lanes)
        self.set_editing(lanes is None)

    def tell(self, lanes: ComparedLanes | None, run_id: int) -> None:
        """Bring verdicts, sentence and progress up to date; the sentence is about one lane."""
        self.sentence.setVisible(lanes is not None)
        self.progress.setVisible(lanes is not None and not lanes.is_over)
        if lanes is None:
            return
        self.cards.set_verdicts(lanes.verdicts)
        text = verdict_sentence(lanes.verdicts[run_id], lanes.bounds[run_id])
        self.sentence.setText(text)
        self.sentence.setToolTip(plain_tip(text))
        done, total = len(lanes.positions()), max(lanes.n_predict, 0)
        self.progress.setRange(0, total)
        self.progress.setValue(min(done, total))
        of = f" of {total:,}" if total else ""
        self.progress.setToolTip(f"{done:,}{of} tokens in {len(lanes.run_ids)} lanes")

    def retheme(self, theme: Theme) -> None:
        """Take the colours of a theme."""
        self.cards.retheme(theme)
        self.editor.retheme(theme)

    def _lay_out(self) -> None:
        line = QHBoxLayout()
        line.setContentsMargins(2, 0, 0, 0)
        line.setSpacing(4)
        line.addWidget(self.sentence, 1)
        line.addWidget(self.progress)
        line.addWidget(self.edit_button, 0, Qt.AlignmentFlag.AlignRight)
        column = QVBoxLayout(self)
        column.setContentsMargins(6, 4, 6, 0)
        column.setSpacing(4)
        column.addWidget(self.cards)
        column.addLayout(line)
        column.addWidget(self.editor)


_ICON = 16
_STEPS = ("go.first_divergence", "go.previous_divergence", "go.next_divergence")


class PositionBar(QWidget):
    """The choice of the sequence, gone while there is one only, and a button for each step."""

    seq_chosen = Signal(int)

    def __init__(self, actions: Actions, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.seq = QComboBox()
        self.seq.setAccessibleName("Sequence that is compared")
        self.seq.activated.connect(lambda i: self.seq_chosen.emit(int(self.seq.itemData(i))))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(4)
        row.addWidget(self.seq)
        for name in _STEPS:
            row.addWidget(_button(actions[name]))

    def show_sequences(self, lanes: ComparedLanes | None) -> None:
        """Offer the sequences of a comparison, with the one on show chosen."""
        seq_ids = [] if lanes is None else list(lanes.seq_ids)
        self.seq.setVisible(len(seq_ids) > 1)
        if self.seq.count() != len(seq_ids):
            self.seq.clear()
            for seq_id in seq_ids:
                self.seq.addItem(f"sequence {seq_id}", seq_id)
        if lanes is not None:
            self.seq.setCurrentIndex(self.seq.findData(lanes.seq_id))


def _button(action: QAction) -> QToolButton:
    button = QToolButton()
    button.setDefaultAction(action)
    button.setAutoRaise(True)
    button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    button.setIconSize(QSize(_ICON, _ICON))
    button.setAccessibleName(action.text().replace("&", ""))
    return button
