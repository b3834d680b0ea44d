"""What an empty panel offers stays in sight, however narrow the panel is."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QApplication, QLabel, QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.widgets.empty_state import EmptyState


@pytest.mark.parametrize(("part", "n_columns"), [(0.4, 1), (0.75, 2), (2.0, 4)])
def test_buttons_stand_in_as_many_columns_as_there_is_room_for(
    qtbot: QtBot, part: float, n_columns: int
) -> None:
    """part: of the width of all buttons in a row."""
    names = ("Open Model…", "Open Demo", "Connect to Server…", "Open Trace…")
    panel = QWidget()
    qtbot.addWidget(panel)
    empty = EmptyState("Watch", "Open one.", [QAction(name) for name in names], panel)
    buttons = empty.findChildren(QPushButton)
    width = round(part * sum(button.sizeHint().width() for button in buttons))
    empty.resize(width, 400)
    panel.resize(width, 400)
    panel.show()
    qtbot.waitExposed(panel)
    assert [button.text() for button in buttons] == list(names)

    def columns() -> list[int]:
        return sorted(button.mapTo(empty, button.rect().center()).x() // 4 for button in buttons)

    qtbot.waitUntil(lambda: len(set(columns())) == n_columns)
    whole = [button.rect() for button in buttons]
    qtbot.waitUntil(lambda: [button.visibleRegion().boundingRect() for button in buttons] == whole)


@pytest.mark.parametrize("points", [9, 18])
def test_a_low_panel_leaves_out_buttons_then_the_title_and_cuts_no_line(
    qtbot: QtBot, points: int
) -> None:
    text = "Shows what each snapshot slot holds after every round. " * 3
    empty = EmptyState("No run yet", text, [QAction("Open Model…")])
    qtbot.addWidget(empty)
    empty.setStyleSheet(f"* {{ font-size: {points}pt; }}")
    empty.resize(260, 600)
    empty.show()
    qtbot.waitExposed(empty)
    (button,) = empty.findChildren(QPushButton)
    heading, body = empty.findChildren(QLabel)
    seen = []
    for height in range(600, 30, -20):
        empty.resize(260, height)
        QApplication.sendPostedEvents()
        seen.append((button.isVisible(), heading.isVisible(), "…" not in body.text()))
        assert body.height() >= body.heightForWidth(body.width()), "a line is cut in two"
        assert empty.rect().contains(body.geometry())
        assert (body.toolTip() == "") == seen[-1][2]
    assert list(dict.fromkeys(seen)) == [
        (True, True, True),
        (False, True, True),
        (False, False, True),
        (False, False, False),
    ]
    assert empty.words == ("No run yet", text)
