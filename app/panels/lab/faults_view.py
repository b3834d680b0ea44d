"""What makes runs fail on purpose: scenarios, faults and synthetic acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QLabel, QPushButton, QWidget

from app.widgets.build import made, vbox
from app.widgets.fields import WheelGuard
from app.widgets.fitted_labels import ScrollPage
from app.widgets.option_groups import ProvokingGroup

_SCENARIOS = (
    "Known failures, chosen by what is seen of them, with prompts and settings of their own."
)
_ABOUT = (
    "What is set here joins the options of the Run panel until it is taken back or the window is "
    "closed. It acts in runs that draft."
)


class FaultsView(QWidget):
    """scenarios: the action that offers them. groups: options of the next run, which the Run panel
    reads."""

    def __init__(
        self, scenarios: QAction, groups: Sequence[ProvokingGroup], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.button = QPushButton(scenarios.text())
        self.button.setToolTip(scenarios.toolTip())
        self.button.clicked.connect(scenarios.trigger)
        column = vbox(margins=(8, 6, 8, 6))
        for text, parts in ((_SCENARIOS, [self.button]), (_ABOUT, groups)):
            said = made(QLabel, text, wordWrap=True, muted=True)
            column.addWidget(said)
            for part in parts:
                column.addWidget(part)
        column.addStretch(1)
        for group in groups:
            group.set_open(True)
        vbox(page := ScrollPage(column), of=self, margins=(0, 0, 0, 0))
        WheelGuard(page)
