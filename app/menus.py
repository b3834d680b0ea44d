"""Menus and toolbar, made from the lists in `app.actions`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QMainWindow, QMenu, QToolBar

from app.actions import MENUS, SEPARATOR, TOOLBAR, Actions
from app.settings import THEME_CHOICES, Settings


class RecentMenu(QMenu):
    """The models opened last; those that are gone are greyed."""

    def __init__(
        self, settings: Settings, actions: Actions, open_model: Callable[[Path], None]
    ) -> None:
        super().__init__("Open &Recent")
        self._settings, self._open_model = settings, open_model
        self._clear_action = actions["file.clear_recent"]
        self.setToolTipsVisible(True)
        self.aboutToShow.connect(self.fill)

    def fill(self) -> None:
        """List the models as they are now."""
        self.clear()
        for path in self._settings.recent_models:
            action = self.addAction(path.name)
            action.setToolTip(str(path) if path.exists() else f"{path} is no longer there")
            action.setEnabled(path.exists())
            action.triggered.connect(lambda _=False, chosen=path: self._open_model(chosen))
        self.addSeparator()
        self.addAction(self._clear_action)


def make_menus(window: QMainWindow, actions: Actions, recent: RecentMenu) -> list[QMenu]:
    """Fill the menu bar; returns its menus and their submenus."""
    recent.setParent(window, recent.windowFlags())
    themes = QMenu("&Theme", window)
    themes.addActions([actions[f"view.theme_{name}"] for name in THEME_CHOICES])
    submenus = {"menu.recent": recent, "menu.theme": themes}
    menus: list[QMenu] = [*submenus.values()]
    for title, entries in MENUS:
        menu = window.menuBar().addMenu(title)
        menus.append(menu)
        menu.setToolTipsVisible(True)
        for entry in entries:
            if entry == SEPARATOR:
                menu.addSeparator()
            elif entry in submenus:
                menu.addMenu(submenus[entry])
            else:
                menu.addAction(actions[entry])
    return menus


class FlatToolBar(QToolBar):
    """Without the lines that Fusion draws around a tool bar."""

    def paintEvent(self, event: QPaintEvent) -> None:
        pass  # buttons and separators paint themselves


def make_toolbar(window: QMainWindow, actions: Actions) -> None:
    """Add the one toolbar."""
    bar = FlatToolBar("Main", window)
    bar.setObjectName("toolbar.main")
    bar.setMovable(False)
    bar.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
    bar.toggleViewAction().setEnabled(False)
    for entry in TOOLBAR:
        if entry == SEPARATOR:
            bar.addSeparator()
        else:
            bar.addAction(actions[entry])
    window.addToolBar(bar)
