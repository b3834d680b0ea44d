"""What is above the docks: messages from edge to edge, few of them, notices for a while."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QApplication, QMainWindow, QToolButton
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.looks import Theme, apply_theme
from app.saved.settings import Settings
from app.window import banner as banner_module
from app.window.menus import FlatToolBar
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine


def test_messages_go_from_edge_to_edge_above_the_docks(window: MainWindow, qtbot: QtBot) -> None:
    window.banners.add("error", "This failed. " * 40)
    area = window.banners
    qtbot.waitUntil(area.isVisible)
    assert area.width() == window.width()
    below = area.mapTo(window, QPoint(0, area.height())).y()
    docks = [window.docks["model"], window.docks["run"]]
    assert all(dock.mapTo(window, QPoint()).y() >= below for dock in docks)
    (banner,) = area.banners
    assert banner.text.height() >= 2 * banner.fontMetrics().height(), "it wraps"


def test_a_message_takes_no_more_than_its_lines(window: MainWindow, qtbot: QtBot) -> None:
    window.resize(1280, 800)
    before = window.docks["model"].mapTo(window, QPoint()).y()
    window.banners.add("info", "A sentence of more than forty characters that needs one line.")
    area = window.banners
    qtbot.waitUntil(area.isVisible)
    QApplication.processEvents()
    moved = window.docks["model"].mapTo(window, QPoint()).y() - before
    assert 0 < moved <= 2.5 * area.fontMetrics().height()
    assert area.mapTo(window, QPoint(0, area.height())).y() == before + moved


def test_that_there_are_more_buttons_can_be_seen(qtbot: QtBot, qapp: QApplication) -> None:
    apply_theme(qapp, Theme("dark"))
    window, bar = QMainWindow(), FlatToolBar("Main")
    qtbot.addWidget(window)
    window.addToolBar(bar)
    for i in range(20):
        bar.addAction(f"Action {i}")
    window.resize(300, 100)
    window.show()
    more = window.findChild(QToolButton, "qt_toolbar_ext_button")
    assert more is not None
    qtbot.waitUntil(more.isVisible)
    image = more.grab().toImage()
    places = product(range(image.width()), range(image.height()))
    assert max(image.pixelColor(x, y).lightness() for x, y in places) > 150


def test_notices_go_by_themselves_and_make_room_first(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = window.banners.add
    asked = add("warning", "Keep them?", "", ("&Keep", lambda: None), sticky=True)
    notice, failed = add("info", "Done."), add("error", "It failed.")
    other = add("info", "Also done.")
    assert window.banners.banners == [asked, failed, other], "the notice made room"
    last = add("error", "This too.")
    assert window.banners.banners == [asked, failed, last]
    assert notice not in window.banners.banners
    window.banners.take_down(last)
    monkeypatch.setattr(banner_module, "NOTICE_MS", 0)
    add("info", "Seen.")
    assert window.banners.banners == [asked, failed], "what can be missed has been in sight"


def test_a_killed_window_comes_back_in_its_layout(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    """Nothing is closed here: the settings hold what they held at the kill."""
    window = make_window(Bridge(engine))
    window.actions_by_id["view.layout_rollback"].trigger()
    qtbot.waitUntil(lambda: Settings().layout_name == "rollback")
    window.docks["findings"].show()
    window.appearance.keep()
    assert Settings().layout("rollback") == window.docks.save()
