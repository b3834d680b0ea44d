"""Break rules: conditions at which the run pauses, to add, edit, disable, remove; and deliberate
disturbances: scenarios, faults and synthetic acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QAbstractItemView,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QMenu,
    QPushButton,
    QWidget,
)

from app.looks import Theme, fixed_font
from app.widgets.build import hbox, key_in, made, vbox
from app.widgets.empty_state import StatusMessage
from app.widgets.fields import text
from app.widgets.fitted_labels import ScrollPage
from app.widgets.option_groups import ProvokingGroup
from engine.analysis.breaks import EXAMPLES, BreakHit, BreakRule
from engine.errors import OptionError

_HINT = "A ticked rule pauses the run after a round that matches it."
_RULE = Qt.ItemDataRole.UserRole


class BreaksView(QWidget):
    """A list of rules with ticks, and a line to write new ones, checked while typing.

    Space ticks, F2 edits, Delete removes.
    """

    rules_changed = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._hit: BreakHit | None = None
        self.error = ""
        self.list = made(QListWidget, accessibleName="Break rules", font=fixed_font())
        self.list.setEditTriggers(
            QAbstractItemView.EditTrigger.EditKeyPressed
            | QAbstractItemView.EditTrigger.DoubleClicked
        )
        self.list.itemChanged.connect(self._on_changed)
        key_in(self.list, Qt.Key.Key_Delete, self.remove_current)
        self.line = text(EXAMPLES[0], font=fixed_font(), accessibleName="New break rule")
        self.line.textChanged.connect(self._check)
        self.line.returnPressed.connect(self._add_typed)
        self.add_button = made(QPushButton, "Add", toolTip="Add the typed rule (Enter)")
        self.add_button.clicked.connect(self._add_typed)
        self.examples_button = made(QPushButton, "Examples", toolTip="Insert an example of a rule")
        self.examples_button.setMenu(self._make_menu())
        self.remove_button = made(QPushButton, "Remove", toolTip="Remove the chosen rule (Delete)")
        self.remove_button.clicked.connect(self.remove_current)
        self._message = StatusMessage(theme)
        self.list.currentRowChanged.connect(lambda row: self.remove_button.setEnabled(row >= 0))
        self.remove_button.setEnabled(False)
        self._lay_out()
        theme.apply(self._check)

    # -- what the window reads and sets ----------------------------------------------------

    @property
    def message(self) -> str:
        """The sentence below the input line."""
        return self._message.text

    def rules(self) -> tuple[BreakRule, ...]:
        return tuple(BreakRule.parse(text) for text, ticked in self.entries() if ticked)

    def entries(self) -> list[tuple[str, bool]]:
        """All rules as text, and whether each is ticked."""
        items = (self.list.item(row) for row in range(self.list.count()))
        return [(item.data(_RULE), item.checkState() is Qt.CheckState.Checked) for item in items]

    def set_entries(self, entries: list[tuple[str, bool]]) -> None:
        """Replace the list; a text that does not parse is skipped."""
        with QSignalBlocker(self.list):
            self.list.clear()
            for text, ticked in entries:
                with suppress(OptionError):
                    self._append(BreakRule.parse(text), ticked)
        self.rules_changed.emit()

    def add(self, rule: BreakRule) -> None:
        """Append a rule, ticked; an existing one is ticked and chosen."""
        for row, (known, _) in enumerate(self.entries()):
            if known == str(rule):
                self.list.item(row).setCheckState(Qt.CheckState.Checked)
                self.list.setCurrentRow(row)
                return
        self._append(rule, ticked=True)
        self.list.setCurrentRow(self.list.count() - 1)
        self.rules_changed.emit()

    def remove_current(self) -> None:
        row = self.list.currentRow()
        if row >= 0:
            self.list.takeItem(row)
            self.rules_changed.emit()

    def show_hit(self, hit: BreakHit | None) -> None:
        """Show what the run has paused at, or clear that."""
        self._hit = hit
        if hit is not None:
            rows = [row for row, (text, _) in enumerate(self.entries()) if text == str(hit.rule)]
            self.list.setCurrentRow(rows[0] if rows else -1)
        self._check()

    def begin_typing(self) -> None:
        """Focus the line for new rules."""
        self.line.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.line.selectAll()

    # -- internals -------------------------------------------------------------------------

    def _lay_out(self) -> None:
        row = hbox(self.add_button, self.examples_button, self.remove_button, 1, spacing=4)
        vbox(
            self.line, row, self._message, (self.list, 1), of=self, margins=(6, 6, 6, 6), spacing=4
        )

    def _make_menu(self) -> QMenu:
        menu = QMenu(self)
        for example in EXAMPLES:
            menu.addAction(example, lambda text=example: self._write(text))
        return menu

    def _write(self, text: str) -> None:
        self.line.setText(text)
        self.begin_typing()

    def _append(self, rule: BreakRule, ticked: bool) -> None:
        item = QListWidgetItem(str(rule))
        item.setData(_RULE, str(rule))
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable | Qt.ItemFlag.ItemIsUserCheckable)
        item.setCheckState(Qt.CheckState.Checked if ticked else Qt.CheckState.Unchecked)
        with QSignalBlocker(self.list):
            self.list.addItem(item)
        self.list.viewport().update()

    def _add_typed(self) -> None:
        try:
            self.add(BreakRule.parse(self.line.text()))
        except OptionError as error:
            self._message.say("error", str(error))
        else:
            self.line.clear()

    def _on_changed(self, item: QListWidgetItem) -> None:
        """A tick or a text has changed; a text that does not parse is restored."""
        with QSignalBlocker(self.list):
            try:
                text = str(BreakRule.parse(item.text()))
                item.setData(_RULE, text)
                item.setText(text)
                self._check()
            except OptionError as error:
                item.setText(item.data(_RULE))
                self._message.say("error", str(error))
        self.rules_changed.emit()

    def _check(self) -> None:
        """Check the line being typed; while it is empty, show what the run paused at."""
        self.error = ""
        if self.line.text().strip():
            try:
                BreakRule.parse(self.line.text())
            except OptionError as error:
                self.error = str(error)
        self.add_button.setEnabled(bool(self.line.text().strip()) and not self.error)
        if self.error:
            self._message.say("error", self.error)
        elif self._hit is not None:
            self._message.say("warning", f"Last stop: {self._hit}.")
        else:
            self._message.say("info", _HINT)


_SCENARIOS = "Known failures, listed by symptom, each with its own prompt and settings."
_ABOUT = (
    "These options are added to those of the Run panel until they are reset or the window is "
    "closed. They have an effect only in runs that draft."
)


class FaultsView(QWidget):
    """scenarios: the action that offers them. groups: options of the next run, read by the Run
    panel."""

    def __init__(self, scenarios: QAction, groups: Sequence[ProvokingGroup]) -> None:
        super().__init__()
        self.button = made(QPushButton, scenarios.text(), toolTip=scenarios.toolTip())
        self.button.clicked.connect(scenarios.trigger)
        column = vbox(margins=(8, 6, 8, 6))
        for about, parts in ((_SCENARIOS, [self.button]), (_ABOUT, groups)):
            said = made(QLabel, about, wordWrap=True, muted=True)
            column.addWidget(said)
            for part in parts:
                column.addWidget(part)
        column.addStretch(1)
        for group in groups:
            group.set_open(True)
        vbox(ScrollPage(column), of=self, margins=(0, 0, 0, 0))
