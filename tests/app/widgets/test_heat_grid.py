"""A heat map by the keyboard: it says where the keys begin, and forgets it when they leave."""

from __future__ import annotations

import numpy as np
from PySide6.QtWidgets import QLineEdit, QWidget
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.trace_models.tune_surface import BEST, HeatMap
from app.widgets.build import vbox
from app.widgets.heat_grid import HeatGrid


def test_the_best_cell_is_pointed_at_while_the_grid_has_the_keys(qtbot: QtBot) -> None:
    grid, other, whole = HeatGrid(Theme("light"), "Speed"), QLineEdit(), QWidget()
    vbox(other, grid, of=whole)
    qtbot.addWidget(whole)
    texts = (("1", "2"), ("3", "4"))
    labels = ("0", "1")
    values = np.arange(4.0).reshape(2, 2)
    grid.set_map(HeatMap("n_max", "p_min", labels, labels, values, texts, {BEST: (1, 0)}))
    cells: list[object] = []
    grid.pointed.connect(cells.append)
    whole.show()
    whole.activateWindow()
    other.setFocus()
    qtbot.waitUntil(other.hasFocus)
    grid.setFocus()
    assert grid.accessibleDescription() == "n_max 0, p_min 1: 3"
    other.setFocus()
    assert grid.accessibleDescription() == "p_min by n_max; best: n_max 0, p_min 1, 3"
    assert cells == [(1, 0), None]
