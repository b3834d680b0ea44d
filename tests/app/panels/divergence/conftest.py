"""The divergence view over traces made by hand."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.actions import Actions
from app.looks import Theme
from app.panels.divergence.divergence_view import DivergenceView
from engine.trace.run_ref import RunRef
from tests.support.lane_traces import faulty_comparison


def shown(qtbot: QtBot, theme: Theme) -> DivergenceView:
    actions = QObject()
    view = DivergenceView(theme, Actions(actions))
    actions.setParent(view)
    qtbot.addWidget(view)
    view.resize(700, 760)
    view.show()
    qtbot.waitExposed(view)
    return view


@pytest.fixture
def view(qtbot: QtBot) -> DivergenceView:
    return shown(qtbot, Theme("dark"))


@pytest.fixture
def faulty(view: DivergenceView) -> DivergenceView:
    view.show_run(RunRef(faulty_comparison().store, 3))
    QApplication.processEvents()
    return view


def lane(view: DivergenceView, run_id: int) -> RunRef:
    assert view._lanes is not None
    return RunRef(view._lanes.store, run_id)
