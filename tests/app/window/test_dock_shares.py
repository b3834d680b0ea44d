"""Docks at the bottom keep their share of the window's height, and lines part the areas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PySide6.QtCore import QEvent, QPointF, Qt
from PySide6.QtGui import QImage, QMouseEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.looks import THEME_NAMES
from app.window.dock_area import LAYOUTS
from app.window.window import MainWindow
from tests.support.fake_session import FakeEngine
from tests.support.window_acts import settle

pytestmark = pytest.mark.shares_window

SIZES = ((2560, 1440), (1280, 1000), (1700, 1200))
ONE_COLUMN_LINES = 57
"""Height in which all plots stand one under the other."""


def grow(window: MainWindow, qtbot: QtBot, size: tuple[int, int]) -> None:
    window.resize(*size)
    settle(qtbot)


def share(window: MainWindow, name: str) -> float:
    return window.docks[name].height() / window.height()


@pytest.mark.usefixtures("each_font")
@pytest.mark.thinned(4)
def test_the_share_is_that_of_the_layout_at_any_size(
    make_window: Callable[[Bridge], MainWindow], engine: FakeEngine, qtbot: QtBot
) -> None:
    window = make_window(Bridge(engine))
    for name, layout in LAYOUTS.items():
        grow(window, qtbot, (1280, ONE_COLUMN_LINES * window.fontMetrics().height()))
        window.actions_by_id[f"view.layout_{name}"].trigger()
        for size in SIZES:
            grow(window, qtbot, size)
            first, wanted = next(iter(layout.bottom.items()))
            found = share(window, first)
            assert found == pytest.approx(wanted, abs=0.03), (name, size)


def test_many_small_steps_do_not_add_up(window: MainWindow, qtbot: QtBot) -> None:
    grow(window, qtbot, (1280, 1000))
    before = share(window, "rollback")
    for height in (*range(1000, 1400, 7), *range(1400, 1000, -3), 1000):
        window.resize(1280, height)
    settle(qtbot)
    assert share(window, "rollback") == pytest.approx(before, abs=0.005)


@pytest.mark.parametrize("height", [300, 190])
def test_a_dragged_height_is_the_share_from_then_on(
    window: MainWindow, qtbot: QtBot, height: int
) -> None:
    grow(window, qtbot, (1280, 1200))
    dock = window.docks["rollback"]
    window.resizeDocks([dock], [height], Qt.Orientation.Vertical)
    settle(qtbot)
    left = Qt.MouseButton.LeftButton
    QApplication.sendEvent(
        window,
        QMouseEvent(
            QEvent.Type.MouseButtonRelease,
            QPointF(1, 1),
            QPointF(1, 1),
            left,
            Qt.MouseButton.NoButton,
            Qt.KeyboardModifier.NoModifier,
        ),
    )
    assert dock.height() == height
    for after in (1400, 1200):
        grow(window, qtbot, (1280, after))
        assert share(window, "rollback") == pytest.approx(height / 1200, abs=0.01)


def test_squeezed_docks_come_back(window: MainWindow, qtbot: QtBot) -> None:
    grow(window, qtbot, (1280, 1300))
    before = share(window, "rollback")
    grow(window, qtbot, (900, 450))
    grow(window, qtbot, (1280, 1300))
    assert share(window, "rollback") == pytest.approx(before, abs=0.005)


@pytest.mark.parametrize("theme", THEME_NAMES)
def test_a_line_parts_docks_and_centre(window: MainWindow, qtbot: QtBot, theme: str) -> None:
    grow(window, qtbot, (1280, 900))
    window.appearance.set_theme(theme)
    settle(qtbot)
    image: QImage = window.grab().toImage()
    wanted = window.panels.theme.color("ui.border").rgb()
    run, rollback = window.docks["run"].geometry(), window.docks["rollback"].geometry()
    beside = [image.pixel(x, run.top() + 60) for x in range(run.right() + 1, rollback.left())]
    above = [
        image.pixel(rollback.left() + 60, y) for y in range(rollback.top() - 8, rollback.top())
    ]
    assert beside.count(wanted) == 1, "one line, not one of each neighbour"
    assert above.count(wanted) == 1


def test_a_panel_at_the_right_keeps_its_share_of_the_width(
    window: MainWindow, qtbot: QtBot
) -> None:
    window.resize(2000, 900)
    window.docks.reveal("inspector")
    settle(qtbot)
    dock, left = window.docks["inspector"], window.docks["model"].width()
    share = dock.width() / 2000
    for width in (1700, 1400, 1150, 1024, 2000):
        window.resize(width, 900)
        settle(qtbot)
        assert window.width() == width
        assert dock.width() == pytest.approx(share * width, abs=2)
        assert window.docks["model"].width() == left


def test_a_layout_left_in_a_large_window_keeps_its_shares_in_a_small_one(
    window: MainWindow, qtbot: QtBot
) -> None:
    grow(window, qtbot, (1920, 1080))
    window.docks.reveal("inspector")
    settle(qtbot)
    docks = [window.docks[name] for name in ("inspector", "rollback")]
    before = docks[0].width() / 1920, docks[1].height() / 1080
    left = window.docks["run"].width()
    window.actions_by_id["view.layout_tune"].trigger()
    settle(qtbot)
    grow(window, qtbot, (1280, 800))
    window.actions_by_id["view.layout_stream"].trigger()
    settle(qtbot)
    after = docks[0].width() / 1280, docks[1].height() / 800
    assert after == pytest.approx(before, abs=0.02)
    assert window.docks["run"].width() == left
