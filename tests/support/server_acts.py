"""What a user does with a server."""

from __future__ import annotations

from collections.abc import Callable

from pytestqt.qtbot import QtBot

from app.engine_thread.events import State
from app.window.window import MainWindow
from tests.support.window_acts import messages, trigger

PLOTS = ("rollback", "ring", "acceptance", "timing", "verify", "kv", "what_if")


def until(qtbot: QtBot, is_so: Callable[[], bool]) -> None:
    qtbot.waitUntil(is_so)


def connect(qtbot: QtBot, window: MainWindow, address: str, key: str = "") -> None:
    window.control.connect_server(address, key)
    until(qtbot, lambda: in_use(window) == address or bool(messages(window)))
    until(qtbot, lambda: window.bridge.state in (State.READY, State.EMPTY))


def in_use(window: MainWindow) -> str:
    server = window.bridge.server
    return "" if server is None else server.facts.address


def run(qtbot: QtBot, window: MainWindow, text: str = "def quicksort(arr):") -> None:
    """Ask the server, and wait for the end."""
    window.run_panel.prompt.setPlainText(text)
    with qtbot.waitSignal(window.bridge.run_ended):
        trigger(window, "run.start")
    until(qtbot, lambda: window.bridge.state is State.READY)
