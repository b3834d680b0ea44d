"""A range of rounds as a subject: dragged over a plot or text, figures by hand, copied, zoomed to,
compared with another one, left."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.trace_models.run_rows import Position, RunRange, range_figures
from app.window.window import MainWindow
from engine.trace.run_ref import RunRef
from tests.support.timed_trace import timed_trace
from tests.support.trace_builder import TraceBuilder, sample_trace

pytestmark = pytest.mark.shares_window


@pytest.fixture
def shown(window: MainWindow) -> MainWindow:
    window.panels.show_tokens(True)
    window.feed.show_run(sample_trace(rounds=60).run)
    for name in ("rollback", "inspector"):
        window.docks.reveal(name)
    QApplication.processEvents()
    return window


def drag(window: MainWindow, qtbot: QtBot, first: int, last: int) -> None:
    """Over these rounds of the rollback plot."""
    plot = window.plots.rollback.plot
    ends = [plot.mapFromScene(plot.box.mapViewToScene(QPointF(x, 1.0))) for x in (first, last)]
    middle = QPoint((ends[0].x() + ends[1].x()) // 2, ends[0].y())
    left = Qt.MouseButton.LeftButton
    qtbot.mousePress(plot.viewport(), left, pos=ends[0])
    for place in (middle, ends[1]):
        qtbot.mouseMove(plot.viewport(), place)
        qtbot.wait(30)  # pyqtgraph takes no two moves at once
    qtbot.mouseRelease(plot.viewport(), left, pos=ends[1])


def test_figures_of_a_range_are_sums_by_hand() -> None:
    builder = TraceBuilder()
    builder.prompt(["p"])
    builder.plain("o")  # the first row of a sequence counts as its prompt
    builder.draft(["a"], "b", ["x", "y"])
    builder.draft(["c", "d", "e"], "f")
    builder.draft([], "g", ["x"], path="restore")
    builder.plain("h")
    found = range_figures(RunRange(builder.run, 2, 3))
    assert (found["rounds"], found["tokens"]) == ("2", "6")
    assert (found["accepted"], found["acceptance"]) == ("4 of 6", "0.667")
    assert [found[f"  position {i}"] for i in range(3)] == ["1.00", "0.50", "0.50"]
    assert found["tokens per round"] == "3.00"
    assert (found["rollbacks"], found["  deepest"]) == ("1", "2")
    whole = range_figures(RunRange(builder.run))
    assert (whole["rounds"], whole["tokens"], whole["restores"]) == ("4", "8", "1")
    assert RunRange(builder.run, 2, 3).title == "Rounds 2–3"


def test_times_are_those_of_the_rounds_of_the_range() -> None:
    store, _, run_id = timed_trace(60)
    rows = [store.rounds.row(i) for i in range(len(store.rounds))]
    mine = [r for r in rows if r["run_id"] == run_id and 10 <= r["round"] <= 19]
    verify = sum(row["verify_ms"] for row in mine) / 10
    found = range_figures(RunRange(RunRef(store, run_id), 10, 19))
    assert found["  verify"] == f"{verify:.3g}"


def test_a_drag_over_a_plot_makes_a_range_the_subject(shown: MainWindow, qtbot: QtBot) -> None:
    drag(shown, qtbot, 20, 29)
    range_view = shown.inspector.range
    assert range_view.shown == RunRange(shown.feed.run, 20, 29)  # type: ignore[arg-type]
    assert range_view.isVisible() and range_view.title.text() == "Rounds 20–29"
    assert range_view.model.heads == ["", "Rounds 20–29", "Whole run"]
    first, stop = shown.tokens.areas[0].selection
    rounds = shown.tokens.areas[0].stream.rounds[first:stop]  # type: ignore[union-attr]
    assert (min(rounds), max(rounds)) == (20, 29), "the text of the range is selected"
    range_view.copy.click()
    assert QGuiApplication.clipboard().text().startswith("|  | Rounds 20–29 | Whole run |\n")
    range_view.zoom.click()
    left, right = shown.plots.rollback.plot.x_range
    assert 15 < left < 20 and 29 < right < 35
    range_view.keep.click()
    drag(shown, qtbot, 30, 32)
    assert range_view.model.heads == ["", "Rounds 30–32", "Rounds 20–29", "Whole run"]
    qtbot.keyClick(shown.plots.rollback.plot, Qt.Key.Key_Escape)
    assert range_view.shown is None and not range_view.isVisible()
    assert shown.plots.rollback.plot.chosen_range is None


def test_a_position_ends_the_range_and_another_run_too(shown: MainWindow) -> None:
    run = shown.feed.run
    assert run is not None
    shown.feed.set_range(RunRange(run, 3, 5))
    assert shown.plots.rollback.plot.chosen_range == (3, 5)
    shown.feed.move_cursor(Position(run, 0, 7, None))
    assert shown.inspector.range.shown is None
    shown.feed.set_range(RunRange(run, 3, 5))
    shown.feed.show_run(sample_trace(rounds=5).run)
    assert shown.inspector.range.shown is None and shown.plots.rollback.plot.chosen_range is None


def test_a_drag_over_text_makes_one_too_and_leaves_what_is_copied(
    shown: MainWindow, qtbot: QtBot
) -> None:
    area = shown.tokens.areas[0]
    # of rows that are in sight as a whole
    spans = [(span, y) for span, y in area._spans_in_sight() if y >= 0]
    boxes = [area._box(span, y).center().toPoint() for span, y in (spans[2], spans[12])]
    left = Qt.MouseButton.LeftButton
    qtbot.mousePress(area.viewport(), left, pos=boxes[0])
    qtbot.mouseMove(area.viewport(), boxes[1])
    qtbot.mouseRelease(area.viewport(), left, pos=boxes[1])
    tokens = spans[2][0].token, spans[12][0].token
    assert area.selection == (tokens[0], tokens[1] + 1)
    rounds = area.stream.rounds  # type: ignore[union-attr]
    shown_range = shown.inspector.range.shown
    assert shown_range is not None
    assert (shown_range.first, shown_range.last) == (rounds[tokens[0]], rounds[tokens[1]])
