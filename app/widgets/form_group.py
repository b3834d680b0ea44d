"""A part of a form that folds away under its title."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.widgets.fields import add_row, new_form, reading
from app.widgets.fitted_labels import ElidedLabel


class FormGroup(QWidget):
    """Rows under a title with an arrow; folded at first, gone while no row is relevant.

    The title is followed by what differs from the first values, such as "temperature 0.8,
    top_k 20"; plain: the text there when nothing does.
    """

    folded = Signal()
    """The user has folded the rows away, or unfolded them."""

    def __init__(self, title: str, parent: QWidget | None = None, *, plain: str = "") -> None:
        super().__init__(parent)
        self._title, self._plain = title, plain
        self._relevant: dict[QWidget, bool] = {}
        self._first: dict[QWidget, tuple[str, str]] = {}
        self._gone = False
        self.header = QToolButton()
        self.header.setText(title)
        self.header.setAutoRaise(True)
        self.header.setArrowType(Qt.ArrowType.RightArrow)
        self.header.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.header.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.header.clicked.connect(self._toggle)
        self._summary = ElidedLabel()
        self._summary.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self._summary.setTextFormat(Qt.TextFormat.PlainText)
        self._body = QWidget()
        self._form = new_form()
        self._form.setContentsMargins(12, 0, 0, 4)
        self._body.setLayout(self._form)
        self._body.hide()
        top = QHBoxLayout()
        top.setSpacing(6)
        top.addWidget(self.header)
        top.addWidget(self._summary, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(top)
        column.addWidget(self._body)
        self.summarise()

    @property
    def summary(self) -> str:
        return self._summary.text()

    @property
    def is_open(self) -> bool:
        """Whether the rows are unfolded."""
        return not self._body.isHidden()

    def add(self, label: str, field: QWidget, tip: str, name: str = "") -> None:
        """Append a row. What the field holds now is what the summary leaves out."""
        add_row(self._form, label, field, tip, name)
        self._relevant[field] = True
        self._first[field] = (label, reading(field))

    def set_relevant(self, field: QWidget, relevant: bool) -> None:
        """Show or hide a row."""
        self._form.setRowVisible(field, relevant)
        self._relevant[field] = relevant
        gone = not any(self._relevant.values())
        if gone is not self._gone:  # not before: without a parent it would be a window
            self._gone = gone
            self.setVisible(not gone)

    def summarise(self, warning: str = "") -> None:
        """Say what the relevant rows are set to; with a warning, in the colour of errors."""
        words = []
        for field, (label, first) in self._first.items():
            now = reading(field)
            if self._relevant[field] and now != first:
                words.append(f"{label} {now or 'none'}".strip())
        if warning:
            words.append(warning)
        text = ", ".join(words) or self._plain
        role = QPalette.ColorRole
        self._summary.setText(text)
        self._summary.setForegroundRole(role.BrightText if warning else role.PlaceholderText)
        self._describe()

    def _toggle(self) -> None:
        self.set_open(not self.is_open)
        self.folded.emit()

    def set_open(self, wanted: bool) -> None:
        """Unfold the rows or fold them away."""
        self.header.setArrowType(Qt.ArrowType.DownArrow if wanted else Qt.ArrowType.RightArrow)
        self._body.setVisible(wanted)
        self._describe()

    def _describe(self) -> None:
        state = "unfolded" if self.is_open else "folded"
        self.header.setAccessibleName(f"{self._title}, {state}")
        self.header.setAccessibleDescription(self.summary)
