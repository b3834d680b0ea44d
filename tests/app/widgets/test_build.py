"""Widgets made in one expression."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

from app.widgets.build import made


class Sender(QObject):
    asked = Signal()


def test_a_signal_is_passed_on_to_a_function_and_to_a_signal(qtbot: QtBot) -> None:
    sender, called = Sender(), []
    passing = made(QPushButton, "Ask", clicked=sender.asked)
    calling = made(QPushButton, "Call", clicked=lambda: called.append(1))
    for button in (passing, calling):
        qtbot.addWidget(button)
    with qtbot.waitSignal(sender.asked):
        passing.click()
    calling.click()
    assert called == [1]
