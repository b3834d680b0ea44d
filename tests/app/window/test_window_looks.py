"""Keys, themes, layout and dialogs of the window, and what Qt must keep to."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
from PySide6.QtCore import QByteArray, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QComboBox,
    QDialog,
    QDockWidget,
    QLabel,
    QMainWindow,
    QTabBar,
)
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.saved.settings import TEXT_ZOOMS, Settings
from app.window.dock_area import LAYOUTS, TITLES
from app.window.docks import LAYOUT_VERSION
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import VIEWS, messages, trigger, turn_wheel, wait


@pytest.mark.shares_window
def test_g_toggles_ghosts_but_types_in_the_prompt(window: MainWindow, qtbot: QtBot) -> None:
    ghosts = window.actions_by_id["view.ghosts"]
    before = ghosts.isChecked()
    prompt = window.run_panel.prompt
    prompt.setFocus()
    qtbot.keyClick(prompt, Qt.Key.Key_G)
    assert prompt.toPlainText() == "g"
    assert ghosts.isChecked() is before
    window.setFocus()
    qtbot.keyClick(window, Qt.Key.Key_G)
    assert ghosts.isChecked() is not before
    assert window.settings.ghosts is not before


def test_text_grows_up_to_a_limit_and_stays_so(window: MainWindow) -> None:
    for _ in range(30):
        trigger(window, "view.zoom_in")
    assert window.settings.text_zoom == max(TEXT_ZOOMS)
    trigger(window, "view.zoom_out")
    assert Settings().text_zoom == max(TEXT_ZOOMS) - 1
    trigger(window, "view.zoom_reset")
    assert window.settings.text_zoom == 0


def test_full_screen_is_entered_and_left_by_one_key(window: MainWindow, qtbot: QtBot) -> None:
    for full in (True, False):
        trigger(window, "view.full_screen")
        qtbot.waitUntil(lambda full=full: window.isFullScreen() is full)


def test_ctrl_and_the_wheel_make_the_text_larger(loaded: MainWindow, qtbot: QtBot) -> None:
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    (area,) = loaded.tokens.areas.values()
    zooms, ctrl = [], Qt.KeyboardModifier.ControlModifier
    assert not turn_wheel(area.viewport(), 120, ctrl), "it is left to the view around it"
    for delta in (120, 60, 60):
        assert turn_wheel(loaded.tokens, delta, ctrl)
        zooms.append(loaded.settings.text_zoom)
    assert not turn_wheel(loaded.tokens, 120)
    assert [*zooms, loaded.settings.text_zoom] == [1, 1, 2, 2]


@pytest.mark.shares_window
def test_the_layout_is_chosen_in_the_toolbar(window: MainWindow, qtbot: QtBot) -> None:
    (tabs,) = window.findChildren(QTabBar, "toolbar.layouts")
    assert tabs.isVisible()
    assert [tabs.tabText(at) for at in range(tabs.count())] == [
        layout.title for layout in LAYOUTS.values()
    ]
    qtbot.mouseClick(tabs, Qt.MouseButton.LeftButton, pos=tabs.tabRect(2).center())
    assert window.docks.layout_name == "divergence"
    assert window.actions_by_id["view.layout_divergence"].isChecked()
    window.actions_by_id["view.layout_plots"].trigger()
    assert tabs.tabText(tabs.currentIndex()) == "Plots"


def test_follow_action_and_view_agree(loaded: MainWindow, qtbot: QtBot) -> None:
    follow = loaded.actions_by_id["view.follow"]
    trigger(loaded, "run.start")
    wait(qtbot, loaded, State.READY)
    assert follow.isChecked()
    follow.trigger()
    assert loaded.tokens.follow is False
    loaded.tokens.set_follow(True)
    assert follow.isChecked()


@pytest.mark.shares_window
@pytest.mark.parametrize("choice", ["light", "dark"])
def test_theme_is_applied_and_kept(window: MainWindow, choice: str) -> None:
    trigger(window, f"view.theme_{choice}")
    app = QApplication.instance()
    assert isinstance(app, QApplication)
    app.processEvents()
    assert app.palette().window().color() == window.panels.theme.color("ui.window")
    assert window.panels.theme.name == choice
    assert window.settings.theme == choice
    pixel = window.grab().toImage().pixelColor(window.width() - 5, 5)
    assert (pixel.lightness() < 128) is (choice == "dark")


def test_layout_is_kept_and_reset(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    def new() -> MainWindow:
        return make_window(Bridge(engine))

    first = new()
    shown = {name for name in TITLES if first.docks[name].isVisible()}
    assert shown == set(LAYOUTS["stream"].shown)
    first.docks["memory"].close()
    first.resize(first.width(), 640)
    first.close()
    second = new()
    assert not second.docks["memory"].isVisible()
    assert second.height() == 640
    trigger(second, "view.reset_layout")
    assert second.docks["memory"].isVisible()


def test_spoilt_layout_gives_the_first_one(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine
) -> None:
    Settings().geometry = QByteArray(b"junk")
    Settings().set_layout("stream", QByteArray(b"junk"))
    window = make_window(Bridge(engine))
    assert {name for name in TITLES if window.docks[name].isVisible()} == set(
        LAYOUTS["stream"].shown
    )


def test_a_layout_of_other_docks_gives_the_first_one(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine
) -> None:
    """As the window before this one had: more of them, with other names."""
    before = QMainWindow()
    for name in ("what_if", "gate", "rollback"):
        dock = QDockWidget(name, before)
        dock.setObjectName(f"dock.{name}")
        before.addDockWidget(Qt.DockWidgetArea.LeftDockWidgetArea, dock)
    for version in (LAYOUT_VERSION - 1, LAYOUT_VERSION):
        places = QByteArray(b"640x480 ") + before.saveState(version)
        Settings().set_layout("stream", places)
        window = make_window(Bridge(engine))
        if version != LAYOUT_VERSION:
            shown = {name for name in TITLES if window.docks[name].isVisible()}
            assert shown == set(LAYOUTS["stream"].shown)
        window.docks.reveal("gate")
        assert window.docks["lab"].isVisible()
        window.close()


@pytest.mark.shares_window
def test_panels_have_names_keys_and_object_names(window: MainWindow) -> None:
    for number, name in enumerate(TITLES, start=1):
        dock = window.docks[name]
        assert dock.objectName()
        assert dock.windowTitle() == TITLES[name]
        keys = f"Ctrl+{number}" if number < 10 else ""
        assert window.actions_by_id[f"view.panel_{name}"].shortcut().toString() == keys


@pytest.mark.shares_window
def test_every_choice_says_what_it_chooses(window: MainWindow, qtbot: QtBot) -> None:
    for name in VIEWS:
        window.docks.reveal(name)
        qtbot.waitUntil(lambda at=name: window.docks.view(at) is not None)
    choices = window.findChildren(QComboBox)
    assert len(choices) > 10
    assert [box.accessibleName() for box in choices if not box.toolTip()] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.thinned(4)
def test_buttons_of_titles_are_seen_and_say_what_they_do(window: MainWindow, theme: str) -> None:
    window.appearance.set_theme(theme)
    dock = window.docks["findings"]
    layouts = [window.actions_by_id[f"view.layout_{name}"] for name in ("divergence", "stream")]
    restored = [action.trigger for action in layouts * 2]
    for change in (lambda: dock.setFloating(True), lambda: dock.setFloating(False), *restored):
        change()
        for name in ("float", "close"):
            (button,) = dock.findChildren(QAbstractButton, f"qt_dockwidget_{name}button")
            assert button.toolTip()
            image = button.icon().pixmap(16).toImage()
            drawn = {image.pixelColor(x, y).name() for x in range(16) for y in range(16)}
            assert window.panels.theme.color("ui.muted").name() in drawn


@pytest.mark.shares_window
def test_dialogs_do_not_block_and_go_away(window: MainWindow, qtbot: QtBot) -> None:
    for action in ("help.shortcuts", "help.about"):
        trigger(window, action)
    shown = [d for d in window.findChildren(QDialog) if d.isVisible()]
    assert len(shown) == 2
    assert not any(d.isModal() for d in shown)
    texts = " ".join(label.text() for d in shown for label in d.findChildren(QLabel))
    assert "PySide6" in texts
    for dialog in shown:
        dialog.reject()


def test_report_names_versions_model_and_log(loaded: MainWindow) -> None:
    trigger(loaded, "help.copy_report")
    text = QGuiApplication.clipboard().text()
    for part in ("- torch: ", "- model: model.gguf, qwen35, f32", "model identity", "```"):
        assert part in text


@pytest.mark.shares_window
def test_unexpected_errors_and_old_crashes_are_banners(window: MainWindow) -> None:
    window.show_unexpected("ValueError: odd")
    window.show_crash("Fatal Python error: Segmentation fault")
    assert messages(window)[0].startswith("error: Unexpected error: ValueError: odd.")
    window.banners.banners[1].offer_buttons[0].click()
    assert "Segmentation" in QGuiApplication.clipboard().text()


def test_none_keeps_its_references() -> None:
    """PySide6 6.12 loses one per call and aborts after some thousands."""
    label = QLabel()
    gc.collect()
    before = sys.getrefcount(None)
    for i in range(1000):
        label.setText(str(i))
    assert abs(sys.getrefcount(None) - before) < 100
