"""What a user does in a main window, and what is then on screen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication, QMimeData, QPoint, QPointF, Qt, QTimer, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QWheelEvent
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.engine_thread.worker import Job
from app.window.dock_area import PAGES, TITLES
from app.window.window import MainWindow

VIEWS = (*(n for n in TITLES if n not in PAGES), *(n for pages in PAGES.values() for n in pages))
"""What docks hold, by name."""


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    """Until the engine is in this state."""
    qtbot.waitUntil(lambda: window.bridge.state is state)


def job_ends(
    qtbot: QtBot, bridge: Bridge, kind: type[Job], timeout: int = 5000
) -> AbstractContextManager[Any]:
    """Until a job of this kind has ended, `timeout` ms at most; `args` of what is entered holds
    it."""
    return qtbot.waitSignal(
        bridge.finished, timeout=timeout, check_params_cb=lambda job: isinstance(job, kind)
    )


def turn_wheel(
    widget: QWidget, by: int, keys: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier
) -> bool:
    """Over the middle of a widget; by: in eighths of a degree, above zero away from the user.
    Whether the widget took it: Qt offers what is not the user's to no other."""
    place = QPointF(widget.rect().center())
    none, phase = Qt.MouseButton.NoButton, Qt.ScrollPhase.NoScrollPhase
    at = widget.mapToGlobal(place)
    wheel = QWheelEvent(place, at, QPoint(), QPoint(0, by), none, keys, phase, False)
    QApplication.sendEvent(widget, wheel)
    return wheel.isAccepted()


def settle(qtbot: QtBot) -> None:
    """Until what waits has been handled: events, what they bring about, and single shots of up to
    a second."""

    def is_still() -> bool:
        for _ in range(_PASSES):
            QCoreApplication.sendPostedEvents()
            QApplication.processEvents()
        tops = QApplication.topLevelWidgets()
        return not any(_comes(timer) for top in tops for timer in top.findChildren(QTimer))

    qtbot.waitUntil(is_still)


_PASSES = 8
"""One thing brings about another: a size a layout, a layout a painting."""


def _comes(timer: QTimer) -> bool:
    return timer.isActive() and timer.isSingleShot() and timer.interval() <= 1000


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


def drop(onto: QWidget, *paths: Path | str) -> bool:
    """Drag files, or one text or address, onto a widget; whether it took them, or one around it."""
    data, (first, *_) = QMimeData(), paths
    if isinstance(first, str):
        data.setText(first)
    urls = [QUrl.fromLocalFile(str(path)) for path in paths if isinstance(path, Path)]
    if urls or "://" in str(first):
        data.setUrls(urls or [QUrl(str(first))])
    where, buttons = QPoint(9, 9), Qt.MouseButton.LeftButton
    action, keys = Qt.DropAction.CopyAction, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(where, action, data, buttons, keys)
    enter.ignore()
    QApplication.sendEvent(onto, enter)
    if not enter.isAccepted():
        return False
    QApplication.sendEvent(onto, QDropEvent(QPointF(where), action, data, buttons, keys))
    return True
