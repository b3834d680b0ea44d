"""Where Tab stops in the window: what is in sight, in the order of reading."""

from __future__ import annotations

from functools import partial

import pytest
from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtWidgets import (
    QApplication,
    QCheckBox,
    QComboBox,
    QPushButton,
    QScrollArea,
    QSpinBox,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.actions import PANELS
from app.engine_thread.events import State
from app.looks import FocusFrame
from app.widgets.fields import reading
from app.window.dock_area import LAYOUTS, PAGES, key_stops
from app.window.window import MainWindow
from tests.support.window_acts import turn_wheel


def _button(parent: QWidget, name: str, *box: int) -> QPushButton:
    button = QPushButton(name, parent)
    button.setGeometry(QRect(*box))
    return button


def _names(widget: QWidget) -> list[str]:
    return [stop.text() for stop in key_stops(widget) if isinstance(stop, QPushButton)]


def test_rows_come_before_columns_and_columns_before_what_is_in_them(qtbot: QtBot) -> None:
    whole = QWidget()
    qtbot.addWidget(whole)
    whole.resize(400, 400)
    _button(whole, "right below", 200, 150, 100, 100)
    _button(whole, "left", 0, 50, 100, 200)
    _button(whole, "right above", 200, 40, 100, 100)
    _button(whole, "foot", 0, 300, 400, 30)
    _button(whole, "head", 0, 0, 400, 30)
    whole.show()
    assert _names(whole) == ["head", "left", "right above", "right below", "foot"]


def test_what_scrolls_into_sight_is_a_stop_and_what_is_outside_is_none(qtbot: QtBot) -> None:
    whole = QWidget()
    qtbot.addWidget(whole)
    whole.resize(300, 100)
    area = QScrollArea(whole, focusPolicy=Qt.FocusPolicy.NoFocus)
    area.setGeometry(0, 0, 200, 100)
    page = QWidget()
    page.resize(100, 900)
    _button(page, "below", 0, 800, 80, 30)
    area.setWidget(page)
    _button(whole, "outside", -500, -500, 80, 30)
    _button(whole, "off", 210, 0, 80, 30).setEnabled(False)
    _button(whole, "on", 210, 50, 80, 30)
    whole.show()
    assert _names(whole) == ["below", "on"]


def _walk(window: MainWindow, qtbot: QtBot, key: Qt.Key) -> list[QWidget]:
    """What has the keys after each press, until the first has them again; it is in sight."""
    found: list[QWidget] = []
    while True:
        qtbot.keyClick(QApplication.focusWidget() or window, key)
        at = QApplication.focusWidget()
        assert at is not None
        if at in found or len(found) > 200:
            return found
        assert window.rect().contains(at.mapTo(window, QPoint())), at
        found.append(at)


@pytest.mark.shares_window
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tab_comes_to_what_is_in_sight_and_back(
    window: MainWindow, qtbot: QtBot, layout: str
) -> None:
    window.actions_by_id[f"view.layout_{layout}"].trigger()
    window.activateWindow()
    window.setFocus()
    qtbot.waitUntil(window.hasFocus)
    there = _walk(window, qtbot, Qt.Key.Key_Tab)
    assert len(there) > 3
    there[0].setFocus()
    back = _walk(window, qtbot, Qt.Key.Key_Backtab)
    assert back == there[::-1]


@pytest.mark.shares_window
def test_the_keys_go_on_from_what_was_hidden(window: MainWindow, qtbot: QtBot) -> None:
    window.activateWindow()
    stops = key_stops(window.docks["run"])
    stops[2].setFocus()
    qtbot.waitUntil(stops[2].hasFocus)
    stops[2].setEnabled(False)
    assert QApplication.focusWidget() is stops[3]
    stops[2].setEnabled(True)


def test_an_area_that_has_the_keys_is_framed(window: MainWindow, qtbot: QtBot) -> None:
    def frames() -> list[FocusFrame]:
        return [frame for frame in window.findChildren(FocusFrame) if frame.isVisible()]

    def framed() -> list[QWidget | None]:
        return [frame.parentWidget() for frame in frames()]

    def comes_to(field: QWidget) -> bool:
        window.activateWindow()  # one of another test may close only now
        field.setFocus(Qt.FocusReason.TabFocusReason)
        return framed() == [field]

    if QApplication.mouseButtons() != Qt.MouseButton.NoButton:  # another test may have pressed it
        qtbot.mouseRelease(window, Qt.MouseButton.LeftButton)
    window.activateWindow()
    prompt = window.run_panel.prompt
    prompt.setFocus()
    qtbot.waitUntil(lambda: framed() == [prompt])
    assert frames()[0].mask().contains(QPoint(0, 0))
    prompt.resize(prompt.width(), prompt.height() + 7)
    assert frames()[0].size() == prompt.size()
    box = window.run_panel.findChildren(QCheckBox)[0]
    for field in (window.run_panel.compute, box):
        qtbot.waitUntil(partial(comes_to, field))
    window.setFocus()
    qtbot.waitUntil(lambda: framed() == [])
    qtbot.mousePress(box, Qt.MouseButton.LeftButton)
    assert box.hasFocus() and framed() == [], "the pointer is on it"
    qtbot.mouseRelease(box, Qt.MouseButton.LeftButton)
    window.setFocus()
    qtbot.waitUntil(lambda: framed() == [])


def test_a_right_click_on_a_title_offers_every_panel_and_nothing_else(window: MainWindow) -> None:
    menu = window.createPopupMenu()
    assert [action.objectName() for action in menu.actions()] == [spec.id for spec in PANELS]
    menu.deleteLater()


@pytest.mark.shares_window
def test_the_wheel_changes_no_field_without_the_keys(window: MainWindow) -> None:
    for names in PAGES.values():
        for name in names:
            window.docks.enter(name)
            QApplication.processEvents()
    window.setFocus()
    fields = [*window.findChildren(QSpinBox), *window.findChildren(QComboBox)]
    assert len(fields) > 20
    for field in fields:
        before = reading(field)
        turn_wheel(field, -120)
        assert reading(field) == before, field.accessibleName()


def test_a_shortcut_brings_the_keys_to_a_panel_in_sight_and_then_closes_it(
    window: MainWindow, qtbot: QtBot
) -> None:
    dock, action = window.docks["run"], window.actions_by_id["view.panel_run"]
    window.activateWindow()
    window.setFocus()
    qtbot.waitUntil(window.hasFocus)
    for n in range(3):
        qtbot.keyClick(
            QApplication.focusWidget() or window, Qt.Key.Key_2, Qt.KeyboardModifier.ControlModifier
        )
        at = QApplication.focusWidget()
        has_keys = at is not None and dock.isAncestorOf(at)
        assert (dock.isVisible(), action.isChecked(), has_keys) == (n != 1,) * 3
    action.trigger()
    assert not dock.isVisible(), "in the menu it is a tick"


@pytest.mark.parametrize("panel", ["tokens", "rollback"])
def test_the_keys_stay_in_the_panel_whose_button_was_pressed(
    loaded: MainWindow, qtbot: QtBot, panel: str
) -> None:
    view = loaded.tokens if panel == "tokens" else loaded.plots[panel]
    loaded.activateWindow()
    button = next(b for b in view.findChildren(QPushButton) if b.text() == "Run" and b.isEnabled())
    view.empty.set_brief(False)
    button.setVisible(True)
    button.setFocus()
    qtbot.waitUntil(button.hasFocus)
    qtbot.keyClick(button, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: loaded.bridge.state is State.READY and not view.empty.isVisible())
    at = QApplication.focusWidget()
    assert at is not None and at is not view and view.isAncestorOf(at)
