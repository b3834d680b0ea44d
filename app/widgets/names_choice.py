"""Choosing any number of names, such as drafters: a button whose menu ticks them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QAction, QKeyEvent, QMouseEvent, QPalette
from PySide6.QtWidgets import QApplication, QMenu, QSizePolicy, QToolButton, QWidget

NONE = "none"


class NamesChoice(QToolButton):
    """Shows the chosen names in the order in which they were given, whatever was ticked first.

    names: with what the tip of each says.
    changed: the choice is another one. chosen: the user made it. alarming: any choice is red.
    """

    changed = Signal()
    chosen = Signal()

    def __init__(
        self, names: Mapping[str, str], parent: QWidget | None = None, *, alarming: bool = False
    ) -> None:
        super().__init__(parent)
        self._alarming = alarming
        self._names: tuple[str, ...] = ()
        menu = _StayingMenu(self)
        menu.setToolTipsVisible(True)
        self._none = menu.addAction(NONE)
        self._none.triggered.connect(lambda: self._choose(()))
        menu.addSeparator()
        self.actions_by_name: dict[str, QAction] = {}
        self._tips = names
        for name, tip in names.items():
            action = menu.addAction(name)
            action.setToolTip(tip)
            action.setCheckable(True)
            action.triggered.connect(self._choose_ticked)
            self.actions_by_name[name] = action
        self.setMenu(menu)
        self.setText(NONE)
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    def names(self) -> tuple[str, ...]:
        """The chosen names, in order."""
        return self._names

    def set_names(self, names: Collection[str]) -> None:
        """Tick these names and no others."""
        chosen = tuple(name for name in self.actions_by_name if name in names)
        for name, action in self.actions_by_name.items():
            action.setChecked(name in chosen)
        if chosen != self._names:
            self._names = chosen
            self.setText(", ".join(chosen) or NONE)
            self._colour()
            self.changed.emit()

    def set_refused(self, reasons: Mapping[str, str]) -> None:
        """Disable names and say why; all others can be chosen."""
        for name, action in self.actions_by_name.items():
            action.setEnabled(name not in reasons)
            action.setToolTip(reasons.get(name, self._tips[name]))

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.PaletteChange:
            self._colour()

    def _colour(self) -> None:
        """Red while an alarming name is chosen: tool buttons paint no foreground role."""
        if not self._alarming:
            return
        role = QPalette.ColorRole
        palette = QApplication.palette()
        wanted = palette.color(role.BrightText if self._names else role.ButtonText)
        if self.palette().color(role.ButtonText) != wanted:
            own = QPalette()  # all other roles stay the application's
            own.setColor(role.ButtonText, wanted)
            self.setPalette(own)

    def _choose(self, names: Collection[str]) -> None:
        self.set_names(names)
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
