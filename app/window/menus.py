"""Menus and toolbar, made from the lists in `app.actions.actions`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QPaintEvent
from PySide6.QtWidgets import (
    QMainWindow,
    QMenu,
    QMenuBar,
    QSizePolicy,
    QTabBar,
    QToolBar,
    QToolButton,
    QWidget,
)

from app.actions.actions import MENUS, PANELS, SEPARATOR, TOOLBAR, Actions
from app.looks.tabs import mark_front_tab
from app.saved.settings import THEME_CHOICES, Settings
from app.trace_models.plain_tip import plain_tip
from app.trace_models.run_rows import UNITS
from app.widgets.build import made, vbox
from app.window.dock_area import LAYOUTS

_PLOTS = (
    *(f"plot.x_{unit}" for unit in UNITS),
    SEPARATOR,
    "plot.show_all",
    "plot.reset",
    "plot.pin",
    SEPARATOR,
    "plot.overlay",
    "plot.no_overlay",
    SEPARATOR,
    "plot.export",
    "plot.copy_image",
)


class RecentMenu(QMenu):
    """The models and traces opened last; those that are gone are greyed."""

    def __init__(
        self,
        settings: Settings,
        actions: Actions,
        open_model: Callable[[Path], None],
        open_trace: Callable[[Path], None],
    ) -> None:
        super().__init__("Open &Recent")
        self._settings, self._open_model, self._open_trace = settings, open_model, open_trace
        self._clear_action = actions["file.clear_recent"]
        self.setToolTipsVisible(True)
        self.aboutToShow.connect(self.fill)

    def fill(self) -> None:
        self.clear()
        for paths, open_path in (
            (self._settings.recent_models, self._open_model),
            (self._settings.recent_traces, self._open_trace),
        ):
            for path in paths:
                action = self.addAction(path.name)
                tip = str(path) if os.path.exists(path) else f"{path} is no longer there"
                action.setToolTip(plain_tip(tip))
                action.setEnabled(os.path.exists(path))
                action.triggered.connect(lambda _=False, at=path, run=open_path: run(at))
            self.addSeparator()
        self.addAction(self._clear_action)


class PlotsMenu(QMenu):
    """What all plots share; their titles and a right click in them open it too."""

    def __init__(self, actions: Actions) -> None:
        super().__init__("Pl&ots")
        self.setToolTipsVisible(True)
        for entry in _PLOTS:
            if entry == SEPARATOR:
                self.addSeparator()
            else:
                self.addAction(actions[entry])


def make_menus(
    window: QMainWindow, bar: QMenuBar, actions: Actions, recent: RecentMenu, plots: PlotsMenu
) -> list[QMenu]:
    """Fill the menu bar; returns its menus and their submenus."""
    for submenu in (recent, plots):
        submenu.setParent(window, submenu.windowFlags())
    themes = QMenu("&Theme", window)
    themes.addActions([actions[f"view.theme_{name}"] for name in THEME_CHOICES])
    layouts = QMenu("&Layout", window)
    layouts.addActions([actions[f"view.layout_{name}"] for name in LAYOUTS])
    panels = QMenu("Pa&nels", window)
    panels.addActions([actions[spec.id] for spec in PANELS])
    for menu in (themes, layouts, panels):
        menu.setToolTipsVisible(True)
    submenus = {
        "menu.panels": panels,
        "menu.recent": recent,
        "menu.theme": themes,
        "menu.layout": layouts,
        "menu.plots": plots,
    }
    menus: list[QMenu] = [*submenus.values()]
    for title, entries in MENUS:
        menu = bar.addMenu(title)
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
    """Without the lines that Fusion draws around a tool bar, and with a sign of more buttons in the
    colour of text: Fusion's can hardly be seen on a dark ground."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        more = self.findChild(QToolButton, "qt_toolbar_ext_button")
        assert more is not None
        more.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
        more.setText("»")

    def paintEvent(self, event: QPaintEvent) -> None:
        pass  # buttons and separators paint themselves


def make_toolbar(actions: Actions) -> QToolBar:
    bar = FlatToolBar("Main")
    bar.setObjectName("toolbar.main")
    bar.setMovable(False)
    bar.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
    bar.toggleViewAction().setEnabled(False)
    for entry in TOOLBAR:
        if entry == SEPARATOR:
            bar.addSeparator()
        else:
            bar.addAction(actions[entry])
    space = QWidget()
    space.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
    bar.addWidget(space)
    bar.addWidget(_layout_tabs([actions[f"view.layout_{name}"] for name in LAYOUTS]))
    return bar


def make_head(bar: QMenuBar, *below: QWidget) -> QWidget:
    """What goes from edge to edge of the window above its docks: the menu bar, and widgets below
    it that may wrap their text, as those in Qt's own tool bar area may not."""
    vbox(bar, *below, of=(head := QWidget()), margins=(0, 0, 0, 0), spacing=0)
    return head


def _layout_tabs(layouts: Sequence[QAction]) -> QTabBar:
    """A tab for each layout; the one in use is in front."""
    tabs = made(QTabBar, objectName="toolbar.layouts", accessibleName="Layouts")
    mark_front_tab(tabs)
    tabs.setDrawBase(False)
    tabs.setExpanding(False)
    tabs.setElideMode(Qt.TextElideMode.ElideNone)
    for at, action in enumerate(layouts):
        tabs.addTab(action.text().replace("&", ""))
        tabs.setTabToolTip(at, action.toolTip())
        action.toggled.connect(lambda on, at=at: tabs.setCurrentIndex(at) if on else None)
    tabs.tabBarClicked.connect(lambda at: layouts[at].trigger() if at >= 0 else None)
    tabs.currentChanged.connect(
        lambda at: None if layouts[at].isChecked() else layouts[at].trigger()
    )
    return tabs
