"""The findings of a run and of lanes, and where they lead."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.findings_view import FindingsView
from app.trace_models.run_rows import Position
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.lane_traces import faulty_comparison
from tests.support.trace_builder import TraceBuilder
from tests.support.window_acts import settle


@pytest.fixture
def view(qtbot: QtBot) -> FindingsView:
    view = FindingsView(Theme("dark"))
    qtbot.addWidget(view)
    view.resize(700, 300)
    view.show()
    return view


def find(store: TraceStore, run_id: int, round_: int | None, severity: str = "warning") -> None:
    store.findings.append(
        run_id=run_id,
        round=round_,
        seq_id=0,
        rule="replay-livelock",
        severity=severity,
        message=f"Round {round_} is replayed again and again.",
        evidence="3 replays",
    )


def cell(view: FindingsView, row: int, name: str) -> str:
    return str(view.model.index(row, view.model.column_of(name)).data())


def headings(view: FindingsView) -> str:
    return " ".join(label.text() for label in view.findChildren(QLabel) if label.isVisible())


def test_empty_states(view: FindingsView) -> None:
    view.show_run(None)
    assert "No run yet" in headings(view)
    builder = TraceBuilder()
    view.show_run(builder.run)
    assert "No findings" in headings(view)


def test_findings_of_the_run_on_show_arrive(view: FindingsView, qtbot: QtBot) -> None:
    builder = TraceBuilder()
    find(builder.store, builder.run_id, 4)
    find(builder.store, builder.run_id + 1, 5)
    counts: list[int] = []
    view.count_changed.connect(counts.append)
    view.show_run(builder.run)
    assert view.model.rowCount() == 1
    find(builder.store, builder.run_id, 6, "error")
    view.refresh()
    assert [cell(view, row, "round") for row in range(2)] == ["4", "6"]
    assert [cell(view, row, "severity") for row in range(2)] == ["warning", "error"]
    assert cell(view, 0, "rule") == "replay-livelock"
    assert cell(view, 0, "evidence") == "3 replays"
    assert cell(view, 0, "suggestion") == ""
    icon = view.model.index(1, 0).data(Qt.ItemDataRole.DecorationRole)
    assert not icon.isNull()
    assert counts == [1, 2]
    assert view.table.isColumnHidden(view.model.column_of("lane"))


def test_what_follows_is_marked_below_its_cause(view: FindingsView) -> None:
    builder = TraceBuilder()
    for rule, number in (("rollback-end", 1), ("position-gap", 2)):
        builder.store.findings.append(
            run_id=builder.run_id,
            round=number,
            seq_id=0,
            rule=rule,
            severity="error",
            message=f"Round {number}.",
            evidence="",
        )
    view.show_run(builder.run)
    assert [cell(view, row, "rule") for row in range(2)] == ["rollback-end", "↳ position-gap"]
    tip = view.model.index(1, view.model.column_of("rule")).data(Qt.ItemDataRole.ToolTipRole)
    assert tip == "Follows from rollback-end"
    view.table.selectRow(1)
    assert "follows from rollback-end" in view.detail.text()


def test_choosing_jumps_to_the_round(view: FindingsView, qtbot: QtBot) -> None:
    store = faulty_comparison().store
    find(store, 3, 2, "error")
    find(store, 2, None)
    view.show_run(RunRef(store, 1))
    assert [cell(view, row, "lane") for row in range(2)] == [
        "ring,fault=no-conv-rollback",
        "checkpoint",
    ]
    assert not view.table.isColumnHidden(view.model.column_of("lane"))
    with qtbot.assertNotEmitted(view.position_selected):
        view.table.setFocus()  # passing by with Tab moves nothing
    with qtbot.waitSignal(view.position_selected) as signal:
        qtbot.mouseClick(
            view.table.viewport(),
            Qt.MouseButton.LeftButton,
            pos=view.table.visualRect(view.model.index(0, 1)).center(),
        )
    assert signal.args == [Position(RunRef(store, 3), 0, 2, None)]
    assert "Round 2 is replayed again and again.\n3 replays" in headings(view)
    with qtbot.waitSignal(view.run_selected) as signal:
        qtbot.keyClick(view.table, Qt.Key.Key_Down)
    assert signal.args == [RunRef(store, 2)], "a finding about the whole run"


def test_the_cursor_marks_its_finding(view: FindingsView, qtbot: QtBot) -> None:
    store = faulty_comparison().store
    find(store, 3, 1)
    find(store, 3, 2)
    view.show_run(RunRef(store, 3))
    with qtbot.assertNotEmitted(view.position_selected):
        view.set_cursor(Position(RunRef(store, 3), 0, 2, 15))
    assert view.table.currentIndex().row() == 1
    view.show_run(RunRef(store, 2))
    assert view.model.rowCount() == 2, "another lane of the same comparison"
    view.set_cursor(None)
    assert not view.table.currentIndex().isValid()


@pytest.mark.parametrize("width", [520, 640, 1280])
def test_columns_are_as_wide_as_what_is_in_them(
    view: FindingsView, qtbot: QtBot, width: int
) -> None:
    store = faulty_comparison().store
    find(store, 3, 2, "error")
    view.show_run(RunRef(store, 1))
    view.resize(width, 300)
    settle(qtbot)
    table = view.table
    for name in ("severity", "rule", "round", "seq", *(["lane"] if width > 1000 else [])):
        column = view.model.column_of(name)
        assert table.columnWidth(column) >= table.sizeHintForColumn(column), name
    message = view.model.column_of("message")
    right = table.columnViewportPosition(message) + table.columnWidth(message)
    if width >= 640:
        assert right == table.viewport().width(), "the message ends with the table"
        assert table.columnWidth(message) >= 36 * view.fontMetrics().averageCharWidth()
    lane = view.model.index(0, view.model.column_of("lane"))
    assert lane.data(Qt.ItemDataRole.ToolTipRole) == lane.data(), "where it is cut"


def test_the_first_finding_is_told_in_full_while_none_is_chosen(view: FindingsView) -> None:
    builder = TraceBuilder()
    view.show_run(builder.run)
    assert not view.detail.text()
    find(builder.store, builder.run_id, 4)
    find(builder.store, builder.run_id, 6)
    view.refresh()
    assert view.detail.text().startswith("replay-livelock\nRound 4 is replayed")
    assert not view.table.selectionModel().hasSelection()
    view.set_cursor(Position(builder.run, 0, 6, None))
    assert "Round 6" in view.detail.text()
