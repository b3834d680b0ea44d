"""What an empty panel offers stays in sight, however narrow the panel is."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.widgets.empty_state import EmptyState


@pytest.mark.parametrize(("width", "n_columns"), [(180, 1), (340, 2), (900, 4)])
def test_buttons_stand_in_as_many_columns_as_there_is_room_for(
    qtbot: QtBot, width: int, n_columns: int
) -> None:
    names = ("Open Model…", "Open Demo", "Connect to Server…", "Open Trace…")
    panel = QWidget()
    qtbot.addWidget(panel)
    empty = EmptyState("Watch", "Open one.", [QAction(name) for name in names], panel)
    empty.resize(width, 400)
    panel.resize(width, 400)
    panel.show()
    qtbot.waitExposed(panel)
    buttons = empty.findChildren(QPushButton)
    assert [button.text() for button in buttons] == list(names)

    def columns() -> list[int]:
        return sorted(button.mapTo(empty, button.rect().center()).x() // 4 for button in buttons)

    qtbot.waitUntil(lambda: len(set(columns())) == n_columns, timeout=2000)
    whole = [button.rect() for button in buttons]
    qtbot.waitUntil(
        lambda: [button.visibleRegion().boundingRect() for button in buttons] == whole, timeout=2000
    )
