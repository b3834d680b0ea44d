"""A scenario ends where there is something to see, and says what happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PySide6.QtCore import QPoint
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.panels.tokens.token_area import TokenArea
from app.window.window import MainWindow
from engine.compare.scenario import find_scenario
from resources import SCENARIOS


def wait(qtbot: QtBot, window: MainWindow, state: State) -> None:
    qtbot.waitUntil(lambda: window.bridge.state is state)


def in_sight(area: TokenArea) -> bool:
    """Whether the outlined token is painted."""
    ys = range(0, area.viewport().height(), 4)
    xs = range(0, area.viewport().width(), 4)
    return any(area.token_at(QPoint(x, y)) == area.current for y in ys for x in xs)


def test_it_shows_the_suspect_lane_its_first_divergence_and_the_finding(
    make_window: Callable[[Bridge], MainWindow], qtbot: QtBot
) -> None:
    window = make_window(Bridge())
    window.resize(1280, 800)
    window.open_demo()
    wait(qtbot, window, State.READY)
    scenario = find_scenario(SCENARIOS, "plane-off-by-one")
    window.control.open_scenario(scenario)
    wait(qtbot, window, State.RUNNING)
    wait(qtbot, window, State.READY)
    qtbot.waitUntil(lambda: bool(window.banners.banners))
    shown = window.feed.run
    assert shown is not None
    assert shown.facts["lane"] == "planes,fault=plane-off-by-one"
    lanes = window.divergence._lanes
    assert lanes is not None and window.feed.cursor is not None
    assert window.feed.cursor.pos == int(lanes.beyond(shown.run_id)[0])
    assert not window.divergence.header.editor.isVisible(), "the lanes are the scenario's"
    assert window.divergence.plots.delta.x_range == window.divergence.plots.states.x_range
    assert sum(window.divergence.plots.delta.x_range) == pytest.approx(9 + 33, abs=4)
    (area,) = window.tokens.areas.values()
    qtbot.waitUntil(lambda: in_sight(area))
    assert window.findings.isVisible() and window.divergence.isVisible()
    (chosen,) = window.findings.table.selectionModel().selectedRows()
    assert window.findings.model.rows[chosen.row()]["rule"] == "plane-off-by-one"
    (banner,) = window.banners.banners
    for part in (scenario.title, scenario.about, "plane-off-by-one: diverges first at position"):
        assert part in banner.message
    window.actions_by_id["view.layout_stream"].trigger()
    window.run_panel.n_predict.setValue(4)
    window.actions_by_id["run.start"].trigger()
    wait(qtbot, window, State.READY)
    assert window.banners.banners == []
