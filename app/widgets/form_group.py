"""A part of a form that folds away under its title."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.widgets.elided_label import ElidedLabel
from app.widgets.fields import add_row, new_form


class FormGroup(QWidget):
    """Rows under a title with an arrow; folded at first, gone while no row is relevant.

    Beside the title stands, in few words, what the rows are set to.
    """

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._relevant: dict[QWidget, bool] = {}
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
        self.set_summary("")

    @property
    def summary(self) -> str:
        return self._summary.text()

    def add(self, label: str, field: QWidget, tip: str, name: str = "") -> None:
        """Append a row."""
        add_row(self._form, label, field, tip, name)
        self._relevant[field] = True

    def set_relevant(self, field: QWidget, relevant: bool) -> None:
        """Show or hide a row."""
        self._form.setRowVisible(field, relevant)
        self._relevant[field] = relevant
        gone = not any(self._relevant.values())
        if gone is not self._gone:  # not before: without a parent it would be a window
            self._gone = gone
            self.setVisible(not gone)

    def set_summary(self, text: str, *, alarming: bool = False) -> None:
        """What the rows come to; alarming: in the colour of errors."""
        role = QPalette.ColorRole
        self._summary.setText(text)
        self._summary.setForegroundRole(role.BrightText if alarming else role.PlaceholderText)
        self.header.setAccessibleDescription(text)

    def _toggle(self) -> None:
        self.set_expanded(self._body.isHidden())

    def set_expanded(self, expanded: bool) -> None:
        """Unfold the rows or fold them away."""
        arrow = Qt.ArrowType.DownArrow if expanded else Qt.ArrowType.RightArrow
        self.header.setArrowType(arrow)
        self._body.setVisible(expanded)
