"""The Runs panel as a tree in the real window: comparisons fold, forks are below their parents,
models and scenarios are folders, and the figures are in sight."""

from __future__ import annotations

from typing import Any

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.trace_models.run_facts import ModelRuns
from app.trace_models.run_notes import note
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.trace_builder import sample_trace

ENDED: dict[str, Any] = {"stops": ["limit"]}


def begin(store: TraceStore, **facts: Any) -> RunRef:
    return RunRef(store, store.begin_run({**ENDED, **facts}))


@pytest.fixture
def store(window: MainWindow) -> TraceStore:
    """A run, a comparison of two policies with noise, and a run after them."""
    first = sample_trace(rounds=2).run
    for lane in ("reference", "noise", "planes", "checkpoint"):
        begin(first.store, lane=lane)
    begin(first.store)
    window.feed.show_run(first)
    window.docks.reveal("runs")
    window.runs.refresh_numbers()
    QApplication.processEvents()
    return first.store


def lines(window: MainWindow) -> list[tuple[int, str]]:
    """Depth and lane or drafters of every line, of a folder its title."""
    model = window.runs.model
    return [(one.depth, one.row.drafter if one.row else one.title) for one in model.lines]


def press(qtbot: QtBot, window: MainWindow, *keys: Qt.Key) -> None:
    for key in keys:
        qtbot.keyClick(window.runs.table, key)


def test_lanes_are_one_line_until_it_is_opened(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    plain, whole = (0, "no drafter"), (0, "compare planes, checkpoint")
    assert lines(window) == [plain, whole, plain]
    press(qtbot, window, Qt.Key.Key_Down, Qt.Key.Key_Return)
    assert window.feed.run == RunRef(store, 3), "the first lane that rolls back"
    assert window.runs.table.currentIndex().row() == 1
    press(qtbot, window, Qt.Key.Key_Right)
    lanes = ("reference", "noise", "planes", "checkpoint")
    assert lines(window) == [plain, whole, *((1, f"lane {lane}") for lane in lanes), plain]
    press(qtbot, window, Qt.Key.Key_Down, Qt.Key.Key_Left)
    assert window.runs.table.currentIndex().row() == 1, "left goes to what a line is below"
    press(qtbot, window, Qt.Key.Key_Left)
    assert lines(window) == [plain, whole, plain]
    window.feed.select_run(RunRef(store, 1))
    assert window.runs.table.currentIndex().row() == 1, "the comparison stands for its lanes"


def test_a_click_on_the_triangle_folds_and_shows_nothing_else(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    table, model = window.runs.table, window.runs.model

    def click(x: int) -> None:
        place = QPoint(x, table.visualRect(model.index(1, 0)).center().y())
        qtbot.mouseClick(
            table.viewport(), Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier, place
        )

    shown = window.feed.run
    click(5)
    assert len(model.lines) == 7 and window.feed.run == shown
    click(5)
    assert len(model.lines) == 3
    click(table.columnWidth(0) - 3)
    assert len(model.lines) == 3 and window.feed.run == RunRef(store, 3)


def test_a_search_opens_what_is_folded(window: MainWindow, store: TraceStore) -> None:
    window.runs.search.field.setText("lane noise")
    assert lines(window) == [(0, "compare planes, checkpoint"), (1, "lane noise")]
    window.runs.search.field.clear()
    assert len(lines(window)) == 3


def test_forks_are_below_the_run_that_they_go_on_from(
    window: MainWindow, store: TraceStore, qtbot: QtBot
) -> None:
    begin(store, fork={"parent": 0, "round": 1})
    begin(store, fork={"parent": 6, "round": 2})
    begin(store, fork={"parent": 5, "round": 1})
    window.runs.refresh_numbers()
    plain, whole = (0, "no drafter"), (0, "compare planes, checkpoint")
    forks = [(1, "round 1, no drafter"), (2, "round 2, no drafter")]
    assert lines(window) == [plain, *forks, whole, plain, forks[0]]
    assert window.runs.model.index(2, 0).data().strip() == "7"
    press(qtbot, window, Qt.Key.Key_Left)
    assert lines(window) == [plain, whole, plain, forks[0]]
    press(qtbot, window, Qt.Key.Key_Right)
    window.runs.delete_asked.emit([RunRef(store, 0)])
    alone = [(0, forks[0][1]), (1, forks[1][1])]
    assert lines(window) == [whole, plain, forks[0], *alone]


def test_models_and_scenarios_are_folders(window: MainWindow, qtbot: QtBot) -> None:
    first, second = sample_trace(rounds=2), sample_trace(rounds=2)
    for _ in range(2):
        lane = begin(first.store, lane="reference")
        for one in (lane, begin(first.store, lane="planes")):
            note(one, scenario="A stale plane")
        begin(first.store)
    window.runs.set_recorded([ModelRuns("a", first.store), ModelRuns("b", second.store)])
    window.runs.show_run(second.run)
    window.docks.reveal("runs")
    plain, lanes = (1, "no drafter"), (2, "compare planes")
    of_a = [plain, (1, "A stale plane"), lanes, lanes, plain, plain]
    assert lines(window) == [(0, "a"), *of_a, (0, "b"), plain]
    table = window.runs.table
    table.setCurrentIndex(window.runs.model.index(2, 0))
    press(qtbot, window, Qt.Key.Key_Return)
    assert lines(window) == [(0, "a"), plain, (1, "A stale plane"), plain, plain, (0, "b"), plain]
    table.setCurrentIndex(window.runs.model.index(0, 0))
    press(qtbot, window, Qt.Key.Key_Left)
    assert lines(window) == [(0, "a"), (0, "b"), plain]
    assert len(window.runs.model.rows) == 8, "what is folded is still found"


def test_figures_are_in_sight_in_a_small_window(window: MainWindow, store: TraceStore) -> None:
    window.resize(1280, 800)
    window.docks.reset()
    window.docks.reveal("inspector")  # which needs less width, and shares its place
    window.docks.reveal("runs")
    QApplication.processEvents()
    table, model = window.runs.table, window.runs.model
    for name in ("acceptance", "speed", "seconds"):
        column = model.column_of(name)
        right = table.columnViewportPosition(column) + table.columnWidth(column)
        assert right <= table.viewport().width(), name


def test_lanes_count_as_one_and_names_have_room(window: MainWindow, store: TraceStore) -> None:
    view = window.runs
    n_lines = len(lines(window))
    assert view.search._count.text() == f"{n_lines} runs"
    assert len(view.model.rows) > n_lines
    narrow = view.table.columnWidth(0)
    view.rename_asked.emit(view.model.rows[0].run, "before the fix of the cache")
    assert view.table.columnWidth(0) > narrow
    needed = view.fontMetrics().horizontalAdvance("before the fix of the cache")
    assert view.table.columnWidth(0) >= needed
    view.delete_asked.emit([view.model.rows[-1].run])
    assert view.search._count.text() == f"{n_lines - 1} runs"


def test_a_run_is_laid_over_a_run_and_a_lane_over_a_lane(
    window: MainWindow, store: TraceStore
) -> None:
    other = window.runs.model.other
    assert other(None) == RunRef(store, 5)
    window.feed.show_run(RunRef(store, 5))
    assert other(None) == RunRef(store, 0), "the lanes are newer"
    assert other(RunRef(store, 3)) == RunRef(store, 3), "it was chosen"
    window.feed.show_run(RunRef(store, 3))
    assert other(None) == RunRef(store, 4)
