"""What a user does in a main window, and what is then on screen."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.shell.window import MainWindow


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    """Until the engine is in this state; 5 s, so for fake engines only."""
    qtbot.waitUntil(lambda: window.bridge.state is state, timeout=5000)


def trigger(window: MainWindow, action_id: str) -> None:
    """Choose an action of the menus, which must be enabled."""
    action = window.actions_by_id[action_id]
    assert action.isEnabled(), action_id
    action.trigger()


def enabled(window: MainWindow) -> set[str]:
    """Ids of the actions that can be chosen."""
    return {a.objectName() for a in window.actions_by_id if a.isEnabled()}


def messages(window: MainWindow) -> list[str]:
    """The banners, each as "severity: message remedy"."""
    return [f"{b.severity}: {b.message} {b.remedy}".strip() for b in window.banners.banners]


def drop(window: MainWindow, *paths: Path) -> bool:
    """Drag files onto the window; whether it took them."""
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    where, buttons = QPoint(300, 300), Qt.MouseButton.LeftButton
    action, keys = Qt.DropAction.CopyAction, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(where, action, data, buttons, keys)
    enter.ignore()
    QApplication.sendEvent(window, enter)
    if not enter.isAccepted():
        return False
    QApplication.sendEvent(window, QDropEvent(QPointF(where), action, data, buttons, keys))
    return True
