"""When a second run is laid over the one on show, and when it goes."""

from __future__ import annotations

from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QMenu
from pytestqt.qtbot import QtBot

import app.panels.runs.runs_view
from app.panels.plots.bar_view import OverlaidView
from app.window.plot_group import OVER_ROUNDS
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.app.panels.plots.conftest import BARS, LONG, in_front, line, n_over
from tests.support.timed_trace import add_rounds, begin

# -- which run ------------------------------------------------------------------------------

pytestmark = pytest.mark.shares_window


def test_a_key_lays_the_newest_other_or_the_chosen_run_over(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    assert not window.actions_by_id["plot.overlay"].isEnabled()
    window.feed.show_run(RunRef(store, 2))
    qtbot.keyClick(window, Qt.Key.Key_O)
    assert window.feed.overlay is not None and window.feed.overlay.run.run_id == 1
    window.runs.table.setCurrentIndex(window.runs.model.index(0, 0))
    qtbot.keyClick(window, Qt.Key.Key_O)
    assert window.feed.overlay.run.run_id == 0
    qtbot.keyClick(window, Qt.Key.Key_O, Qt.KeyboardModifier.ShiftModifier)
    assert window.feed.overlay is None


def test_one_run_has_none_to_lay_over(window: MainWindow) -> None:
    store = TraceStore()
    add_rounds(store, begin(store, ()), 0, 3, drafts=False)
    window.feed.show_run(RunRef(store, 0))
    assert not window.actions_by_id["plot.overlay"].isEnabled()
    window.feed.set_overlay(RunRef(store, 0))
    assert window.feed.overlay is None, "no run lies over itself"
    window.feed.set_overlay(RunRef(store, 7))
    assert window.feed.overlay is None


def test_by_ctrl_and_a_click(window: MainWindow, store: TraceStore, qtbot: QtBot) -> None:
    window.resize(1280, 800)
    window.feed.show_run(RunRef(store, 0))
    window.docks.reveal("runs")
    window.runs.refresh_numbers()
    QApplication.processEvents()
    assert window.runs.hint.isVisible()
    table = window.runs.table
    qtbot.mouseClick(
        table.viewport(),
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.ControlModifier,
        table.visualRect(window.runs.model.index(2, 2)).center(),
    )
    assert window.feed.run == RunRef(store, 0) and window.feed.overlay is not None
    assert window.feed.overlay.run == RunRef(store, 2)
    assert window.runs.pair.isVisible() and not window.runs.hint.isVisible()


def test_by_the_menu_of_the_list(window: MainWindow, store: TraceStore) -> None:
    window.feed.show_run(RunRef(store, 1))
    window.docks.reveal("runs")
    QApplication.processEvents()
    table = window.runs.table

    def entries(row: int) -> dict[str, Any]:
        place = table.visualRect(window.runs.model.index(row, 0)).center()
        table.customContextMenuRequested.emit(place)
        menu = QApplication.activePopupWidget()
        assert isinstance(menu, QMenu)
        found = {action.text().replace("&", ""): action for action in menu.actions()}
        menu.close()
        return found

    assert not entries(1)["Overlay with This Run"].isEnabled(), "the run on show"
    over = entries(2)["Overlay with This Run"]
    assert not entries(2)["No Overlay"].isEnabled()
    over.trigger()
    assert window.feed.overlay is not None and window.feed.overlay.run.run_id == 2
    assert not window.runs.model.index(2, 0).data(Qt.ItemDataRole.DecorationRole).isNull()
    assert window.runs.model.index(0, 0).data(Qt.ItemDataRole.DecorationRole) is None
    off = entries(2)["No Overlay"]
    off.trigger()
    assert window.feed.overlay is None


def test_taken_off_the_list_it_is_taken_off_the_plots(
    overlaid: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    overlaid.docks.reveal("runs")
    table = overlaid.runs.table
    table.setFocus()
    for run_id in (0, 2):
        assert overlaid.feed.overlay is not None
        row = overlaid.runs.model.line_of(RunRef(store, run_id))
        assert row is not None
        table.setCurrentIndex(overlaid.runs.model.index(row, 0))
        qtbot.keyClick(table, Qt.Key.Key_Delete)
    assert overlaid.feed.overlay is None
    assert [row.run.run_id for row in overlaid.runs.model.rows] == [1]
    assert len(line(overlaid, "rollback")[0]) == 0


def test_a_new_run_keeps_it_and_places_change(overlaid: MainWindow, store: TraceStore) -> None:
    view = in_front(overlaid, "kv")
    new = begin(store, ("draft-mtp",))
    overlaid.feed.show_run(RunRef(store, new))
    assert view.overlay is not None and (view.overlay.run.run_id, view.overlay.over.run_id) == (
        2,
        new,
    )
    add_rounds(store, new, 0, 4)
    overlaid.feed.refresh()
    x, _ = line(overlaid, "kv")
    assert x[-1] == LONG - 0.5
    overlaid.feed.show_run(RunRef(store, 2))
    assert view.overlay is not None and (view.overlay.run.run_id, view.overlay.over.run_id) == (
        new,
        2,
    )
    assert view.legend.leading_labels == [f"run {new}"]
    x, _ = line(overlaid, "kv")
    assert x[-1] == 3.5


def test_another_trace_or_none_takes_it_off(overlaid: MainWindow) -> None:
    other = TraceStore()
    for _ in range(3):
        add_rounds(other, begin(other, ()), 0, 3, drafts=False)
    overlaid.feed.show_run(RunRef(other, 1))
    assert overlaid.feed.overlay is None
    assert len(line(overlaid, "rollback")[0]) == 0
    overlaid.feed.set_overlay(RunRef(other, 0))
    assert len(line(overlaid, "rollback")[0]) == 6
    overlaid.feed.clear()
    assert overlaid.feed.overlay is None
    assert overlaid.status.overlay.isHidden()


def test_a_run_that_goes_on_grows(overlaid: MainWindow, store: TraceStore) -> None:
    for name in (*BARS, "acceptance"):
        view = in_front(overlaid, name)
        overlaid.actions_by_id["plot.show_all"].trigger()
        before = n_over(view)
        n_rounds = int(store.rounds.column("round")[-1]) + 1
        add_rounds(store, 2, n_rounds, n_rounds + 2, 2)
        overlaid.feed.refresh()
        overlaid.actions_by_id["plot.show_all"].trigger()
        assert n_over(view) > before, name
    view = in_front(overlaid, "kv")
    before = n_over(view)
    n_rounds = int(store.rounds.column("round")[-1]) + 1
    add_rounds(store, 2, n_rounds, n_rounds + 2, 2)
    overlaid.actions_by_id["plot.pin"].setChecked(True)
    overlaid.plots.rollback.plot.box.setXRange(-0.5, n_rounds + 5, padding=0)
    overlaid.feed.refresh()
    assert n_over(view) == before + 4, "without anything else that draws the plot"


# -- what it costs --------------------------------------------------------------------------


def test_out_of_sight_nothing_is_read(
    window: MainWindow, store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compare = app.panels.runs.runs_view.compare_runs
    monkeypatch.setattr(
        app.panels.runs.runs_view, "compare_runs", lambda *a: asked.append(a) or compare(*a)
    )
    for name in (*OVER_ROUNDS, "runs"):
        window.docks[name].hide()
    QApplication.processEvents()
    window.feed.show_run(RunRef(store, 1))
    window.feed.set_overlay(RunRef(store, 2))
    window.feed.refresh()
    overlay = window.feed.overlay
    assert overlay is not None
    assert overlay._axis.rows is None
    assert asked == []
    views = [window.plots[name] for name in OVER_ROUNDS]
    assert all(n_over(view) == 0 for view in views if isinstance(view, OverlaidView))
    view = in_front(window, "timing")
    assert n_over(view) > 0
    window.docks.reveal("runs")
    QApplication.processEvents()
    assert len(asked) == 1
    window.runs.refresh_numbers()
    assert len(asked) == 1, "nothing is new"
    add_rounds(store, 2, LONG, LONG + 1, 2)
    window.runs.refresh_numbers()
    assert len(asked) == 2
