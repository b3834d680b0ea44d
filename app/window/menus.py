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
    QToolBar,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.actions import PANELS
from app.actions.actions import MENUS, TOOLBAR, Actions
from app.actions.spec import SEPARATOR
from app.saved.settings import THEME_CHOICES, Settings
from app.trace_models.plain_tip import plain_tip
from app.trace_models.run_rows import UNITS
from app.window.docks import LAYOUTS
from engine.compare.memory_script import MemoryScript
from engine.compare.scenario import Scenario

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
        """List the files as they are now."""
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


class ScenarioMenu(QMenu):
    """Scenarios and scripts of memory operations by title, each with what it is about as its
    tooltip; hidden without any."""

    def __init__(
        self,
        scenarios: Sequence[Scenario | MemoryScript],
        open_scenario: Callable[[Scenario | MemoryScript], None],
    ) -> None:
        super().__init__("Sc&enarios")
        self.setToolTipsVisible(True)
        self.menuAction().setVisible(bool(scenarios))
        before: Scenario | MemoryScript | None = None
        for scenario in scenarios:
            if before and isinstance(scenario, MemoryScript) > isinstance(before, MemoryScript):
                self.addSeparator()
            before = scenario
            action = self.addAction(scenario.title.replace("&", "&&"))
            action.setObjectName(f"scenario.{scenario.name}")
            action.setToolTip(scenario.about)
            action.triggered.connect(lambda _=False, chosen=scenario: open_scenario(chosen))

    def set_available(self, available: bool) -> None:
        """Enable the menu and what is in it, which the palette lists too."""
        self.setEnabled(available)
        for action in self.actions():
            action.setEnabled(available)


def make_menus(
    window: QMainWindow,
    bar: QMenuBar,
    actions: Actions,
    recent: RecentMenu,
    scenarios: ScenarioMenu,
    plots: PlotsMenu,
) -> list[QMenu]:
    """Fill the menu bar; returns its menus and their submenus."""
    for submenu in (recent, scenarios, plots):
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
        "menu.scenarios": scenarios,
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
    """The one toolbar."""
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
    bar.addWidget(_layout_button([actions[f"view.layout_{name}"] for name in LAYOUTS]))
    return bar


def make_head(bar: QMenuBar, *below: QWidget) -> QWidget:
    """What goes from edge to edge of the window above its docks: the menu bar, and widgets below
    it that may wrap their text, as those in Qt's own tool bar area may not."""
    column = QVBoxLayout(head := QWidget())
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(0)
    for widget in (bar, *below):
        column.addWidget(widget)
    return head


def _layout_button(layouts: Sequence[QAction]) -> QToolButton:
    """A button that says which layout is in use and opens a menu of them."""
    button = QToolButton()
    button.setObjectName("toolbar.layout")
    button.setAccessibleName("Layout")
    button.setToolTip("Lay the panels out for another purpose (Alt+1 … Alt+5)")
    button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
    menu = QMenu(button)
    menu.addActions(layouts)
    button.setMenu(menu)
    menu.setToolTipsVisible(True)

    def name_it() -> None:
        for action in layouts:
            if action.isChecked():
                button.setText(action.text().replace("&", ""))

    for action in layouts:
        action.toggled.connect(name_it)
    return button
