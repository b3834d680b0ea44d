"""Which sequence of a comparison is on show, and the way from one divergence to the next."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QToolButton, QWidget

from app.actions.actions import Actions
from app.models.compared_lanes import ComparedLanes

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
