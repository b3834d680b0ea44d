"""Fixtures for tests of the window: its own settings, a fake engine, and a strict clean-up."""

from __future__ import annotations

import os

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSettings, QTimer
from PySide6.QtGui import QFont, QFontMetrics
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QDialog
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.saved.settings import Settings
from tests.support.fake_session import FakeEngine

if TYPE_CHECKING:
    from app.window.window import MainWindow


PATIENCE_MS = 120_000
"""What never comes fails a test after this time; a busy machine is slow at everything."""
for _wait in (QtBot.waitUntil, QtBot.waitSignal, QtBot.waitSignals, QtBot.waitExposed):
    _wait.__kwdefaults__["timeout"] = PATIENCE_MS


def _put_settings_into(folder: Path) -> None:
    QSettings.setPath(QSettings.Format.IniFormat, QSettings.Scope.UserScope, str(folder))


@pytest.fixture(autouse=True)
def _settings_in_tmp(tmp_path: Path) -> None:
    _put_settings_into(tmp_path / "settings")


TALL_LINE, MOST_POINTS = 18, 11
"""Pixels: a line of Noto Sans in 10 points, as KDE has it, or of Cantarell in 11, as GNOME has."""


@pytest.fixture(params=["tall", "usual"])
def each_font(request: pytest.FixtureRequest, qapp: QApplication) -> Iterator[None]:
    """The default font, and one with lines as high as those of other desktops. To be used before
    the window is made: @pytest.mark.usefixtures("each_font")."""
    before = qapp.font()
    font = QFont(before)
    if request.param == "tall":
        while QFontMetrics(font).height() < TALL_LINE and font.pointSizeF() < MOST_POINTS:
            font.setPointSizeF(font.pointSizeF() + 0.5)
    qapp.setFont(font)
    yield
    qapp.setFont(before)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A file that the fake engine takes for a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"fake")
    return path


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.gate.set()


@contextmanager
def _closing() -> Iterator[list[MainWindow]]:
    """The windows that are put into the list are closed afterwards; nothing of them may be left."""
    threads = set(threading.enumerate())
    widgets = set(QApplication.topLevelWidgets())
    windows: list[MainWindow] = []
    yield windows
    for window in windows:
        window.close()
        running = [
            t.objectName() or t.interval() for t in window.findChildren(QTimer) if t.isActive()
        ]
        assert not running, f"timers still running: {running}"
        window.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)
    windows.clear()
    left = [t.name for t in set(threading.enumerate()) - threads]
    assert not left, f"threads left behind: {left}"
    tops = [repr(w) for w in set(QApplication.topLevelWidgets()) - widgets if w.isVisible()]
    assert not tops, f"windows left behind: {tops}"


def _shown(bridge: Bridge, data: Path | None = None) -> MainWindow:
    from app.window.dialogs.files import QuitChoice
    from app.window.window import MainWindow

    window = MainWindow(bridge, Settings(), data=data)
    window.sessions.quit_choice = QuitChoice.DISCARD  # a question would wait for ever
    window.show()
    assert QTest.qWaitForWindowExposed(window, PATIENCE_MS)
    return window


@pytest.fixture
def make_window(qapp: QApplication) -> Iterator[Callable[..., MainWindow]]:
    """Shows windows, with a data folder if one is given; afterwards nothing of them may be left."""
    with _closing() as windows:

        def make(bridge: Bridge, data: Path | None = None) -> MainWindow:
            windows.append(_shown(bridge, data))
            return windows[-1]

        yield make


@pytest.fixture(scope="module")
def _window_of_a_module(
    qapp: QApplication, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MainWindow]:
    _put_settings_into(tmp_path_factory.mktemp("settings"))
    with _closing() as windows:
        windows.append(_shown(Bridge(FakeEngine())))
        yield windows[0]


@pytest.fixture
def shared_window(_window_of_a_module: MainWindow) -> Iterator[MainWindow]:
    """One window for the tests of a module that do no more than look at traces and panels: making
    it takes longer than they do. After each of them it is as it was, or the test fails."""
    window = _window_of_a_module
    before = _state(window)
    yield window
    _put_back(window, before)
    left = {name: (was, now) for name, was, now in _changes(before, _state(window))}
    assert not left, f"left in the window, each with what was there before: {left}"


def _state(window: MainWindow) -> dict[str, Any]:
    """What a test may leave in a window that has neither model nor server."""
    from app.window.dock_area import TITLES

    state: dict[str, Any] = {
        "layout": window.docks.layout_name,
        "size": window.size().toTuple(),
        "title": window.windowTitle(),
        "theme": window.panels.theme.name,
        "banners": [banner.message for banner in window.banners.banners],
        "form": window.run_panel.entries(),
        "engine": (window.bridge.state, window.bridge.files, window.bridge.server),
        "traces": (window.bridge.trace_folder, len(window.bridge.store.runs)),
        "on show": (window.feed.run, window.feed.cursor, window.feed.overlay),
        "runs": len(window.runs.model.rows),
        "dialogs": [repr(one) for one in window.findChildren(QDialog) if one.isVisible()],
    }
    for action in window.actions_by_id:
        found = action.isEnabled(), action.isChecked(), action.text()
        state[f"action {action.objectName()}"] = found
    for name in TITLES:
        dock = window.docks[name]
        area = window.dockWidgetArea(dock)
        state[f"dock {name}"] = dock.isHidden(), dock.isFloating(), area, dock.windowTitle()
    return state


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in before | after:
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _put_back(window: MainWindow, state: dict[str, Any]) -> None:
    for job in window.bridge._side:
        assert job.join(PATIENCE_MS / 1e3), f"{job} goes on"
    for dialog in window.findChildren(QDialog):
        dialog.close()
    window.bridge.close_trace()
    window.bridge.closed = None
    window.feed.clear()
    window.banners.clear()
    window.run_panel.put_entries(state["form"])
    window.activateWindow()  # which a menu may have been
    window.resize(*state["size"])
    window.actions_by_id[f"view.layout_{state['layout']}"].trigger()
    window.docks.reset()
    for action in window.actions_by_id:
        _, is_checked, _ = state[f"action {action.objectName()}"]
        if is_checked and not action.isChecked():
            action.trigger()  # one of several, of which there is always one
        elif action.isChecked() and not is_checked and action.actionGroup() is None:
            action.trigger()
    QApplication.processEvents()


@pytest.fixture(autouse=True)
def _no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a keyring; and no test writes into the user's."""
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.fail.Keyring")


@pytest.fixture
def window(request: pytest.FixtureRequest) -> MainWindow:
    """The main window with the fake engine after it, shared where the test is marked so."""
    if request.node.get_closest_marker("shares_window"):
        shared: MainWindow = request.getfixturevalue("shared_window")
        return shared
    make = request.getfixturevalue("make_window")
    alone: MainWindow = make(Bridge(request.getfixturevalue("engine")))
    return alone


@pytest.fixture
def loaded(window: MainWindow, model_file: Path, qtbot: QtBot) -> MainWindow:
    """The main window with a model open."""
    from app.engine_thread.events import State

    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    return window
