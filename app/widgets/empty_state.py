"""What an empty panel shows: what it is for, and the actions that fill it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QLabel, QPushButton, QSizePolicy, QVBoxLayout, QWidget


class EmptyState(QWidget):
    """A title, one sentence, and a button for each action."""

    def __init__(
        self,
        title: str,
        text: str,
        actions: Sequence[QAction] = (),
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        heading = QLabel(title)
        font = heading.font()
        font.setBold(True)
        heading.setFont(font)
        body = QLabel(text)
        body.setWordWrap(True)
        body.setForegroundRole(body.palette().ColorRole.PlaceholderText)
        column = QVBoxLayout(self)
        column.setSpacing(8)
        column.addStretch(2)
        for label in (heading, body):
            label.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            column.addWidget(label)
        for action in actions:
            column.addWidget(_button(action), 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch(3)


def _button(action: QAction) -> QPushButton:
    button = QPushButton(action.text().replace("&", ""))  # the same key twice would be none
    button.setToolTip(action.toolTip())
    button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
    button.clicked.connect(action.trigger)
    return button
