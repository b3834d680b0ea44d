"""The settings that a build is checked at: a form over their options, and those kept from it, so
that several are played in one go."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QPalette
from PySide6.QtWidgets import (
    QAbstractSpinBox,
    QComboBox,
    QGridLayout,
    QLabel,
    QPushButton,
    QToolButton,
    QWidget,
)

from app.widgets.build import hbox, made, vbox
from app.widgets.fields import WheelGuard
from app.widgets.fitted_labels import ElidedLabel
from app.widgets.option_groups import make_field, tip, value_of
from engine.errors import OptionError
from engine.option_fields import build, options_in, words_of
from engine.options.llama_cpp import GateOptions

_PER_ROW = 2
_MOST = 6
"""Settings in one go."""
_CHARACTERS = 7


class GateForm(QWidget):
    """`asked` gives the settings to check: those that were kept, then those in the fields."""

    asked = Signal(object)  # tuple[GateOptions, ...]

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._kept: list[GateOptions] = []
        self.unfold = made(
            QToolButton,
            text="Settings",
            autoRaise=True,
            toolButtonStyle=Qt.ToolButtonStyle.ToolButtonTextBesideIcon,
            clicked=self._toggle,
        )
        self.words = ElidedLabel()
        about = "Keep these settings: they are checked with those chosen after them"
        self.keep = made(QPushButton, "&Keep", toolTip=about, clicked=self._keep)
        self.check = made(QPushButton, "Chec&k", clicked=self.ask)
        top = hbox(self.unfold, (self.words, 1), self.keep, self.check)
        self.body = QWidget()
        grid = QGridLayout(self.body)
        grid.setContentsMargins(12, 0, 0, 4)
        grid.setVerticalSpacing(4)
        self.fields = {one.field: (one, make_field(one)) for one in options_in(GateOptions)}
        for i, (one, field) in enumerate(self.fields.values()):
            field.setToolTip(tip(one))
            field.setAccessibleName(one.row.label)
            field.setAccessibleDescription(tip(one))
            row, column = divmod(i, _PER_ROW)
            if one.kind is bool:
                field.toggled.connect(self._tell)
            else:
                label = QLabel(one.row.label)
                label.setToolTip(tip(one))
                label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
                grid.addWidget(label, row, 2 * column)
                field.setMinimumWidth(_CHARACTERS * self.fontMetrics().averageCharWidth())
                if isinstance(field, QAbstractSpinBox):
                    field.setButtonSymbols(QAbstractSpinBox.ButtonSymbols.NoButtons)
                is_choice = isinstance(field, QComboBox)
                (field.currentTextChanged if is_choice else field.textChanged).connect(self._tell)
            grid.addWidget(field, row, 2 * column + 1)
        for column in range(_PER_ROW):
            grid.setColumnStretch(2 * column + 1, 1)
        self.chips = hbox(1, spacing=4)
        vbox(top, self.body, self.chips, of=self, margins=(0, 0, 0, 0), spacing=2)
        WheelGuard(self)
        self.set_open(True)
        self._tell()

    def follow(self, action: QAction) -> None:
        """Check only while this action can be chosen."""
        self.check.setEnabled(action.isEnabled())
        action.enabledChanged.connect(self.check.setEnabled)

    def options(self) -> GateOptions:
        """What the fields are set to. Raises OptionError."""
        values = {one.path: value_of(one, field) for one, field in self.fields.values()}
        return build(GateOptions, values)

    def set_open(self, wanted: bool) -> None:
        """Show the fields, or what they are set to alone."""
        self.unfold.setArrowType(Qt.ArrowType.DownArrow if wanted else Qt.ArrowType.RightArrow)
        self.body.setVisible(wanted)

    def ask(self) -> None:
        """Ask for the checks, unless a field cannot be read."""
        try:
            wanted = dict.fromkeys((*self._kept, self.options()))
        except OptionError:
            self.set_open(True)
            return  # the error is on show
        self.set_open(False)
        self.asked.emit(tuple(wanted))

    def _toggle(self) -> None:
        self.set_open(self.body.isHidden())

    def _keep(self) -> None:
        options = self.options()
        if options in self._kept:
            return
        self._kept.append(options)
        chip = made(QPushButton, f"{_text(options)} ✕", toolTip="No longer check at these settings")
        chip.clicked.connect(lambda: self._drop(options, chip))
        self.chips.insertWidget(self.chips.count() - 1, chip)
        self._tell()

    def _drop(self, options: GateOptions, chip: QPushButton) -> None:
        self._kept.remove(options)
        chip.deleteLater()
        self._tell()

    def _tell(self) -> None:
        text, role, sound = "", QPalette.ColorRole.PlaceholderText, True
        try:
            text = _text(self.options())
        except OptionError as error:
            text, role, sound = str(error), QPalette.ColorRole.BrightText, False
        self.words.setText(text)
        self.words.setForegroundRole(role)
        self.keep.setEnabled(sound and len(self._kept) < _MOST)


def _text(options: GateOptions) -> str:
    return " ".join(words_of(options)) or "defaults"
