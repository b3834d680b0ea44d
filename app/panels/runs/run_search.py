"""The line above the list of runs: words to look for, starred ones alone, how many are found."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QToolButton, QWidget


class RunSearch(QWidget):
    """`changed`: something else is looked for."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.field = QLineEdit()
        self.field.setPlaceholderText("Name, prompt, model or drafter")
        self.field.setAccessibleName("Search runs")
        self.field.setClearButtonEnabled(True)
        self.field.textChanged.connect(self.changed)
        self.stars = QToolButton()
        self.stars.setText("★")
        self.stars.setCheckable(True)
        self.stars.setToolTip("List starred runs alone")
        self.stars.setAccessibleName("Starred runs alone")
        self.stars.toggled.connect(self.changed)
        self._count = QLabel()
        self._count.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        row = QHBoxLayout(self)
        row.setContentsMargins(6, 4, 8, 4)
        row.setSpacing(6)
        row.addWidget(self.field, 1)
        row.addWidget(self.stars)
        row.addWidget(self._count)

    @property
    def words(self) -> str:
        """What is typed."""
        return self.field.text()

    @property
    def starred_only(self) -> bool:
        return self.stars.isChecked()

    def show_count(self, n_found: int, n_known: int) -> None:
        """Say how many runs are listed, of how many."""
        of = f"{n_found:,} of " if n_found != n_known else ""
        self._count.setText(f"{of}{n_known:,} {'run' if n_known == 1 else 'runs'}")
