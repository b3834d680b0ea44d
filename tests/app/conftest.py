"""Fixtures for tests of the window: its own settings, a fake engine, and a strict clean-up."""

from __future__ import annotations

import os

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSettings, QTimer
from PySide6.QtGui import QFont, QFontMetrics
from PySide6.QtWidgets import QApplication
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


@pytest.fixture(autouse=True)
def _settings_in_tmp(tmp_path: Path) -> None:
    QSettings.setPath(
        QSettings.Format.IniFormat, QSettings.Scope.UserScope, str(tmp_path / "settings")
    )


TALL_LINE, MOST_POINTS = 18, 11
"""Pixels: a line of Noto Sans in 10 points, as KDE has it, or of Cantarell in 11, as GNOME has."""


@pytest.fixture(params=["usual", "tall"])
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


@pytest.fixture
def make_window(qtbot: QtBot) -> Iterator[Callable[..., MainWindow]]:
    """Shows windows, with a data folder if one is given; afterwards nothing of them may be left."""
    from app.window.dialogs.files import QuitChoice
    from app.window.window import MainWindow

    threads = set(threading.enumerate())
    widgets = set(QApplication.topLevelWidgets())
    windows: list[MainWindow] = []

    def make(bridge: Bridge, data: Path | None = None) -> MainWindow:
        window = MainWindow(bridge, Settings(), data=data)
        window.sessions.quit_choice = QuitChoice.DISCARD  # a question would wait for ever
        windows.append(window)
        window.show()
        qtbot.waitExposed(window)
        return window

    yield make
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


@pytest.fixture(autouse=True)
def _no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a keyring; and no test writes into the user's."""
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.fail.Keyring")


@pytest.fixture
def window(make_window: Callable[..., MainWindow], engine: FakeEngine) -> MainWindow:
    """The main window with the fake engine after it."""
    return make_window(Bridge(engine))


@pytest.fixture
def loaded(window: MainWindow, model_file: Path, qtbot: QtBot) -> MainWindow:
    """The main window with a model open."""
    from app.engine_thread.events import State

    window.open_model(model_file)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    return window
