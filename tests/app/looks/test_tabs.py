"""The tab in front is marked with the accent colour, at the side away from its page."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QTabBar
from pytestqt.qtbot import QtBot

from app.looks.theme import THEME_NAMES, Theme, apply_theme, mark_front_tab


@pytest.mark.parametrize("shape", [QTabBar.Shape.RoundedNorth, QTabBar.Shape.RoundedSouth])
@pytest.mark.parametrize("name", THEME_NAMES)
def test_only_the_tab_in_front_has_the_line(
    qtbot: QtBot, qapp: object, name: str, shape: QTabBar.Shape
) -> None:
    theme = Theme(name)
    apply_theme(qapp, theme)  # type: ignore[arg-type]
    bar = QTabBar()
    qtbot.addWidget(bar)
    mark_front_tab(bar)
    bar.setShape(shape)
    for title in ("one", "two", "three"):
        bar.addTab(title)
    bar.resize(bar.sizeHint())
    for front in (1, 2):
        bar.setCurrentIndex(front)
        image = bar.grab().toImage()
        for at in range(bar.count()):
            tab = bar.tabRect(at)
            rows = [
                y
                for y in range(tab.top(), tab.bottom() + 1)
                if image.pixelColor(tab.center().x(), y) == theme.color("ui.accent")
            ]
            assert bool(rows) is (at == front)
            if rows:
                below = shape is QTabBar.Shape.RoundedSouth
                assert (min(rows) > tab.center().y()) is below
