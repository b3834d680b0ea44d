"""What each rollback policy keeps in memory, one line each, the one in use marked."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QPalette
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.looks.theme import figures_font
from app.panels.model.memory_estimate import PolicyCost
from engine.memory.policies import POLICIES
from engine.size_text import size_text

_NAME, _PRODUCT, _TOTAL = range(3)


class PolicyCosts(QWidget):
    """Bytes of a snapshot × snapshots × sequences, and what that comes to."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._labels = {name: (QLabel(), QLabel(), QLabel()) for name in POLICIES}
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(_PRODUCT, 1)
        for row, (name, labels) in enumerate(self._labels.items()):
            for column, label in enumerate(labels):
                label.setFont(figures_font())
                grid.addWidget(label, row, column)
            labels[_NAME].setText(name)
            labels[_TOTAL].setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.setAccessibleName("Memory of each rollback policy")

    @property
    def lines(self) -> dict[str, str]:
        """The line of text about each policy."""
        return {
            name: f"{product.text()} = {total.text()}"
            for name, (_, product, total) in self._labels.items()
        }

    def set_costs(self, costs: Sequence[PolicyCost], chosen: str) -> None:
        """Show these costs; none hides the list."""
        self.setVisible(bool(costs))
        for cost in costs:
            name, product, total = self._labels[cost.policy]
            what = "log entries" if POLICIES[cost.policy].is_log else "snapshots"
            product.setText(f"{size_text(cost.unit_bytes)} × {cost.n_units} × {cost.n_seqs}")
            product.setToolTip(f"Bytes × {what} for each sequence × sequences")
            total.setText(size_text(cost.total))
            role = QPalette.ColorRole
            for label in (name, product, total):
                font = label.font()
                font.setBold(cost.policy == chosen)
                label.setFont(font)
                label.setForegroundRole(
                    role.WindowText if cost.policy == chosen else role.PlaceholderText
                )
        self.setAccessibleDescription(
            ", ".join(f"{name} {line}" for name, line in self.lines.items())
        )
