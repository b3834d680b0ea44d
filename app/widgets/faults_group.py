"""The faults' part of the Run panel: bugs of the field, switched on to learn their signature."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.widgets.form_group import FormGroup
from app.widgets.names_choice import NamesChoice
from engine.options import FAULTS


class FaultsGroup(FormGroup):
    """One choice of names; red while anything is chosen."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Faults", parent, plain="none")
        self._speculative = False
        self.fault = NamesChoice(FAULTS, alarming=True)
        self.add("fault", self.fault, "--fault: bugs of the field, on purpose; output may be wrong")
        self.fault.changed.connect(self._on_changed)
        self._on_changed()

    def set_use(self, speculative: bool) -> None:
        """Without a draft no fault does anything."""
        self._speculative = speculative
        self._on_changed()

    def names(self) -> tuple[str, ...]:
        """The faults that are on."""
        return self.fault.names() if self._speculative else ()

    def _on_changed(self) -> None:
        self.set_relevant(self.fault, self._speculative)
        self.summarise("output may be wrong" if self.names() else "")
        self.changed.emit()
