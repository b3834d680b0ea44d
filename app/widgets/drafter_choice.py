"""Choosing drafters: a button whose menu ticks any number of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QMenu, QSizePolicy, QToolButton, QWidget

from engine.options import DRAFTERS

NONE = "none"


class DrafterChoice(QToolButton):
    """Shows the drafters in use in the order in which they are asked, whatever was ticked first.

    changed: the choice is another one. chosen: the user made it.
    """

    changed = Signal()
    chosen = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._types: tuple[str, ...] = ()
        menu = _StayingMenu(self)
        menu.setToolTipsVisible(True)
        self._none = menu.addAction(NONE)
        self._none.triggered.connect(lambda: self._choose(()))
        menu.addSeparator()
        self.actions_by_name: dict[str, QAction] = {}
        for name in DRAFTERS:
            action = menu.addAction(name)
            action.setCheckable(True)
            action.triggered.connect(self._choose_ticked)
            self.actions_by_name[name] = action
        self.setMenu(menu)
        self.setText(NONE)
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    def types(self) -> tuple[str, ...]:
        """The drafters in use, in order of priority."""
        return self._types

    def set_types(self, names: Collection[str]) -> None:
        """Use these drafters."""
        types = tuple(name for name in DRAFTERS if name in names)
        for name, action in self.actions_by_name.items():
            action.setChecked(name in types)
        if types != self._types:
            self._types = types
            self.setText(", ".join(types) or NONE)
            self.changed.emit()

    def set_refused(self, reasons: Mapping[str, str]) -> None:
        """Disable drafters and say why; all others can be chosen."""
        for name, action in self.actions_by_name.items():
            action.setEnabled(name not in reasons)
            action.setToolTip(reasons.get(name, name))

    def _choose(self, names: Collection[str]) -> None:
        self.set_types(names)
        self.chosen.emit()

    def _choose_ticked(self) -> None:
        self._choose([n for n, action in self.actions_by_name.items() if action.isChecked()])


class _StayingMenu(QMenu):
    """Stays open while entries are ticked, so that several can be."""

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if not self._toggle():
            super().mouseReleaseEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() != Qt.Key.Key_Space or not self._toggle():
            super().keyPressEvent(event)

    def _toggle(self) -> bool:
        action = self.activeAction()
        if action is None or not action.isCheckable() or not action.isEnabled():
            return False
        action.trigger()
        return True
