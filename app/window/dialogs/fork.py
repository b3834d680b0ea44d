"""Asking how a run is to go on from a place in another one."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QDialog, QDialogButtonBox, QWidget

from app.widgets.build import vbox, words
from app.widgets.fields import add_row, new_form, whole

_OPTIONS = ("those of Run Settings", "those that the run had")
_ABOUT = (
    "States, drafters and random numbers become what they were: restored from the nearest "
    "checkpoint (up to 8 of a run are kept while its model is open, 256 MiB for all runs; any "
    "rollback policy), and the rounds after it replayed; else all rounds before are decoded again. "
    "The status line says which."
)
_MOST = 2**31 - 1


class ForkDialog(QDialog):
    """Does not block the window. place: in words. `chosen` gives whether the options of Run
    Settings are meant, else the run's own, and a token that takes the place of the newest one,
    below 0 for none."""

    chosen = Signal(bool, int)

    def __init__(self, place: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle("Continue from here")
        where, about = words(f"From {place}."), words(_ABOUT)
        self.options = QComboBox()
        self.options.addItems(_OPTIONS)
        self.token = whole(-1, _MOST, -1, "none")
        form = new_form()
        tip = "Drafters, n_max, p_min, policy, faults, sampler and seed that it goes on with"
        add_row(form, "&Options", self.options, tip)
        tip = "Id of a token that takes the place of the newest one that stays"
        add_row(form, "Another &token", self.token, tip)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        buttons.addButton("&Continue", QDialogButtonBox.ButtonRole.AcceptRole).setDefault(True)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        vbox(where, form, about, buttons, of=self)

    def accept(self) -> None:
        self.chosen.emit(self.options.currentIndex() == 0, self.token.value())
        super().accept()
