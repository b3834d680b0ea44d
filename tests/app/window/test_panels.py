"""Every panel comes into sight when it is asked for, in every layout, and goes again."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractScrollArea,
    QAbstractSpinBox,
    QDockWidget,
    QFrame,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.window.dock_area import LAYOUTS, TITLES
from app.window.menus import TitleButton
from app.window.window import MainWindow
from tests.support.window_acts import settle

_LEAST = 60
"""A panel that is smaller than this shows nothing."""


def in_sight(dock: QDockWidget) -> bool:
    """Whether the dock's content can be seen: a tab after another is open, but no one sees it."""
    view, window = dock.widget(), dock.window()
    if view is None or not dock.isVisible() or view.width() < _LEAST or view.height() < _LEAST // 2:
        return False
    there = window.childAt(view.mapTo(window, view.rect().center()))
    return there is view or view.isAncestorOf(there)


def in_it(dock: QDockWidget) -> list[QWidget]:
    """What there is to see and use in a panel."""
    view = dock.widget()
    return [w for w in view.findChildren(QWidget) if w.isVisibleTo(view) and w.isEnabled()]


@pytest.fixture
def small(window: MainWindow, qtbot: QtBot) -> MainWindow:
    window.resize(1280, 800)
    settle(qtbot)
    return window


def comes_and_goes(window: MainWindow, qtbot: QtBot, name: str) -> None:
    dock, action = window.docks[name], window.actions_by_id[f"view.panel_{name}"]
    if in_sight(dock):
        action.trigger()
        qtbot.waitUntil(lambda: dock.isHidden() and not action.isChecked())
    action.trigger()
    qtbot.waitUntil(lambda: in_sight(dock) and action.isChecked())
    action.trigger()
    assert dock.isHidden()
    assert not action.isChecked()


@pytest.mark.shares_window
def test_each_panel_comes_and_goes(small: MainWindow, qtbot: QtBot) -> None:
    """One window for all of them: making it takes longer than a panel takes to come."""
    for layout, name in product(LAYOUTS, TITLES):
        small.actions_by_id[f"view.layout_{layout}"].trigger()
        try:
            comes_and_goes(small, qtbot, name)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"the panel {name} in {layout}") from error


@pytest.mark.shares_window
def test_a_panel_behind_a_tab_is_raised_not_closed(small: MainWindow, qtbot: QtBot) -> None:
    for layout in LAYOUTS:
        small.actions_by_id[f"view.layout_{layout}"].trigger()
        small.docks.reset()
        for name in ("findings", "runs"):
            small.docks.reveal(name)
            qtbot.waitUntil(lambda name=name: in_sight(small.docks[name]))
        behind = small.actions_by_id["view.panel_findings"]
        assert not behind.isChecked(), f"{layout}: checked is what can be seen"
        behind.trigger()
        qtbot.waitUntil(lambda: in_sight(small.docks["findings"]))
        assert not small.docks["runs"].isHidden(), f"{layout}: a tab next to it stays open"


def test_the_keys_go_into_the_panel_that_is_asked_for(
    small: MainWindow, qtbot: QtBot, model_file: Path
) -> None:
    def ask_for(name: str) -> None:
        small.run_panel.prompt.setFocus()
        action = small.actions_by_id[f"view.panel_{name}"]
        if action.isChecked():
            action.trigger()
        action.trigger()

    for name in TITLES:
        ask_for(name)
        dock = small.docks[name]
        focus = small.focusWidget()
        empty = not any(w.focusPolicy() & Qt.FocusPolicy.TabFocus for w in in_it(dock))
        assert empty or dock.widget().isAncestorOf(focus), f"the panel {name}"
    ask_for("conversation")
    assert small.focusWidget() is small.panels.conversation.box
    small.open_model(model_file)
    qtbot.waitUntil(lambda: small.bridge.state is State.READY)
    small.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: small.bridge.state is State.READY)
    ask_for("runs")
    assert small.focusWidget() is small.runs.table


@pytest.fixture
def ran(small: MainWindow, model_file: Path, qtbot: QtBot) -> MainWindow:
    """A window with a run on show."""
    small.open_model(model_file)
    qtbot.waitUntil(lambda: small.bridge.state is State.READY)
    small.actions_by_id["run.start"].trigger()
    qtbot.waitUntil(lambda: bool(small.tokens.areas))
    qtbot.waitUntil(lambda: small.bridge.state is State.READY)
    return small


def test_inspecting_a_token_always_shows_the_inspector(ran: MainWindow, qtbot: QtBot) -> None:
    area = next(iter(ran.tokens.areas.values()))
    by_menu = ran.actions_by_id["go.inspect"].trigger
    by_key = partial(qtbot.keyClick, area, Qt.Key.Key_Return)
    for layout in LAYOUTS:
        ran.actions_by_id[f"view.layout_{layout}"].trigger()
        ran.docks.reveal("runs")
        for ask in (by_menu, by_key):
            ran.docks["inspector"].close()
            area.step_token(1)
            ask()
            qtbot.waitUntil(lambda: in_sight(ran.docks["inspector"]))
            ran.docks.reveal("runs")
            qtbot.waitUntil(lambda: not in_sight(ran.docks["inspector"]))
            ask()
            qtbot.waitUntil(lambda: in_sight(ran.docks["inspector"]))


def test_each_plot_has_a_button_for_its_menu(ran: MainWindow, qtbot: QtBot) -> None:
    """It is in sight in the dock's title, and the menu is then about this plot."""
    for name in ("rollback", "acceptance", "timing", "what_if"):
        ran.docks.reveal(name)
        dock = ran.docks[name]
        qtbot.waitUntil(lambda dock=dock: in_sight(dock))
        (button,) = dock.findChildren(TitleButton)
        assert dock.windowTitle() in button.accessibleName()
        place = button.mapTo(ran, button.rect().center())
        assert ran.childAt(place) is button, name
        assert dock.rect().contains(button.geometry())
        assert button.geometry().bottom() <= dock.widget().y()
        ran.activateWindow()
        qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
        menu = ran.plots_menu
        assert menu.isVisible()
        assert ran.plots.chosen() is ran.docks.view(name), name
        menu.close()


@pytest.mark.shares_window
def test_whatever_takes_the_focus_has_a_name(window: MainWindow) -> None:
    """But for the parts that Qt gives its own widgets, which tell the name of the whole."""
    window.actions_by_id["help.shortcuts"].trigger()
    nameless = []
    for widget in window.findChildren(QWidget):
        takes = bool(widget.focusPolicy() & Qt.FocusPolicy.TabFocus)
        parent = widget.parentWidget()
        part = isinstance(parent, QAbstractScrollArea | QAbstractSpinBox) or type(parent) is QFrame
        text = isinstance(widget, QAbstractButton) and widget.text()
        if takes and not (widget.accessibleName() or text or part):
            nameless.append(f"{type(widget).__name__} in {type(parent).__name__}")
    assert nameless == []
