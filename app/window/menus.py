"""Menus and toolbar, made from the lists in `app.actions`; and in a dock's title a menu button and
a note."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QPoint, Qt
from PySide6.QtGui import QAction, QPaintEvent, QPalette
from PySide6.QtWidgets import (
    QAbstractButton,
    QDockWidget,
    QMainWindow,
    QMenu,
    QMenuBar,
    QSizePolicy,
    QTabBar,
    QToolBar,
    QToolButton,
    QWidget,
)

from app.actions import MENUS, PANELS, SEPARATOR, TOOLBAR, Actions
from app.looks import mark_front_tab
from app.saved.settings import THEME_CHOICES, Settings
from app.trace_models.run_rows import UNITS
from app.trace_models.shown_text import plain_tip
from app.widgets.build import made, vbox
from app.widgets.fitted_labels import ElidedLabel
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
    """Recently opened models and traces; missing ones are grey."""

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
    """Settings that all plots share; their titles and a right click in them open it, too."""

    def __init__(self, actions: Actions) -> None:
        super().__init__("Pl&ots")
        self.setToolTipsVisible(True)
        _fill(self, _PLOTS, actions.__getitem__)


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
    menus: list[QMenu] = [panels, recent, themes, layouts, plots]
    names = "panels", "recent", "theme", "layout", "plots"
    in_bar = {f"menu.{name}": menu.menuAction() for name, menu in zip(names, menus, strict=True)}
    for title, entries in MENUS:
        menu = bar.addMenu(title)
        menus.append(menu)
        menu.setToolTipsVisible(True)
        _fill(menu, entries, lambda name: in_bar.get(name) or actions[name])
    return menus


def _fill(bar: QMenu | QToolBar, entries: Sequence[str], find: Callable[[str], QAction]) -> None:
    for entry in entries:
        if entry == SEPARATOR:
            bar.addSeparator()
        else:
            bar.addAction(find(entry))


class FlatToolBar(QToolBar):
    """A tool bar without Fusion's border lines, and with an extension button in the text colour:
    Fusion's is hardly visible on a dark theme."""

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
    _fill(bar, TOOLBAR, actions.__getitem__)
    space = QWidget()
    space.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
    bar.addWidget(space)
    bar.addWidget(_layout_tabs([actions[f"view.layout_{name}"] for name in LAYOUTS]))
    return bar


def make_head(bar: QMenuBar, *below: QWidget) -> QWidget:
    """The full-width part above the docks: the menu bar, and widgets below it that may wrap their
    text, which those in Qt's tool bar area cannot."""
    vbox(bar, *below, of=(head := QWidget()), margins=(0, 0, 0, 0), spacing=0)
    return head


def _layout_tabs(layouts: Sequence[QAction]) -> QTabBar:
    """A tab for each layout; the current one is in front."""
    tabs = made(QTabBar, objectName="toolbar.layouts", accessibleName="Layouts")
    mark_front_tab(tabs)
    tabs.setDrawBase(False)
    tabs.setExpanding(False)
    for at, action in enumerate(layouts):
        tabs.addTab(action.text().replace("&", ""))
        tabs.setTabToolTip(at, action.toolTip())
        action.toggled.connect(lambda on, at=at: tabs.setCurrentIndex(at) if on else None)
    tabs.tabBarClicked.connect(lambda at: layouts[at].trigger() if at >= 0 else None)
    tabs.currentChanged.connect(
        lambda at: None if layouts[at].isChecked() else layouts[at].trigger()
    )
    return tabs


_GAP = 4
_DIRECT = Qt.FindChildOption.FindDirectChildrenOnly
_WITH_TEXT = Qt.ToolButtonStyle.ToolButtonTextBesideIcon
_WITHOUT = Qt.ToolButtonStyle.ToolButtonIconOnly


class TitleButton(QToolButton):
    """A button to the left of Qt's buttons in a dock's title.

    Before the menu opens, the widget that `target` gives gets the focus: the menu's actions apply
    to it.
    """

    def __init__(
        self, dock: QDockWidget, text: str, menu: QMenu, target: Callable[[], QWidget | None]
    ) -> None:
        super().__init__(dock)
        self._dock, self._menu, self._target = dock, menu, target
        self.setText(text)
        self.setAccessibleName(f"{text} menu: {dock.windowTitle()}")
        self.setToolTip("X-axis, zoom, export as PNG, SVG or CSV, copy as image")
        self.setToolButtonStyle(_WITH_TEXT)
        self.setArrowType(Qt.ArrowType.DownArrow)
        self.setAutoRaise(True)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.clicked.connect(self._open)
        self._whole = self.sizeHint().width()
        dock.installEventFilter(self)
        self._place()
        self.show()  # Qt keeps a new child of a visible dock hidden

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest, QEvent.Type.Show):
            self._place()
        return super().eventFilter(watched, event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self.setToolButtonStyle(_WITH_TEXT)
            self._whole = self.sizeHint().width()
            self._place()

    def _place(self) -> None:
        title = self._dock.widget().geometry().top()
        drawn = [
            button
            for button in self._dock.findChildren(QAbstractButton, options=_DIRECT)
            if button is not self and not button.isHidden()
        ]
        right = min((button.x() for button in drawn), default=self._dock.width())
        name = self.fontMetrics().horizontalAdvance(self._dock.windowTitle())
        fits = name + self._whole + 3 * _GAP <= right
        # only on a change: setting it asks the dock for a layout, which calls this
        if fits != (self.toolButtonStyle() is _WITH_TEXT):
            self.setToolButtonStyle(_WITH_TEXT if fits else _WITHOUT)
        height = min(self.sizeHint().height(), title) if title > _GAP else self.sizeHint().height()
        self.resize(self.sizeHint().width(), height)
        self.move(right - self.width() - _GAP, max(0, (title - height) // 2))
        self.raise_()

    def _open(self) -> None:
        if (target := self._target()) is not None:
            target.setFocus(Qt.FocusReason.OtherFocusReason)
        self._menu.popup(self.mapToGlobal(QPoint(0, self.height())))


_LEAST_CHARACTERS = 12
_PLACES = (
    QEvent.Type.Resize,
    QEvent.Type.LayoutRequest,
    QEvent.Type.Show,
    QEvent.Type.WindowTitleChange,
)


class TitleNote(ElidedLabel):
    """Grey words between a dock's title and its buttons; hidden if there is no room."""

    def __init__(self, dock: QDockWidget) -> None:
        super().__init__("", dock)
        self._dock = dock
        self.setForegroundRole(QPalette.ColorRole.PlaceholderText)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)  # the title is dragged
        dock.installEventFilter(self)
        self.hide()

    def say(self, text: str) -> None:
        """Set the words, or none."""
        if text != self.text():
            self.setText(text)
            self._place()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in _PLACES:
            self._place()
        return super().eventFilter(watched, event)

    def _place(self) -> None:
        view, metrics = self._dock.widget(), self.fontMetrics()
        high = 0 if view is None else view.geometry().top()
        x = metrics.horizontalAdvance(self._dock.windowTitle()) + 4 * _GAP
        whole = metrics.horizontalAdvance(self.text())
        least = x + min(whole, _LEAST_CHARACTERS * metrics.averageCharWidth())
        drawn = [one.x() for one in self._dock.findChildren(QAbstractButton, options=_DIRECT)]
        right = min((at for at in drawn if at > 0), default=self._dock.width()) - _GAP
        fits = bool(self.text()) and high > _GAP and right >= least
        self.setGeometry(x, 0, right - x, high)
        self.setVisible(fits)
