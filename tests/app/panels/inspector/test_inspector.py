"""The step inspector in the window: what it shows of a round, and how it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.panels.inspector.inspector_view import InspectorView, step_markdown
from app.panels.inspector.step_table import COLUMNS
from app.panels.tokens.token_scroll import MARGIN
from app.trace_models.run_rows import Position
from app.window.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.judged_round import breakable, judged, step_of
from tests.support.trace_builder import sample_trace
from tests.support.window_acts import settle

pytestmark = pytest.mark.shares_window

NAMES = [column.name for column in COLUMNS]


@pytest.fixture
def shown(window: MainWindow) -> MainWindow:
    show_trace(window, judged())
    return window


def show_trace(window: MainWindow, store: TraceStore) -> None:
    window.panels.show_tokens(True)
    window.feed.show_run(RunRef(store, 0))
    window.docks.reveal("inspector")


def cells(view: InspectorView, row: int) -> dict[str, str]:
    model = view.tokens_model
    return {name: str(model.index(row, i).data()) for i, name in enumerate(NAMES)}


def test_it_is_empty_before_a_run(window: MainWindow) -> None:
    window.docks.reveal("inspector")
    labels = window.inspector.findChildren(QLabel)
    assert any("Press Run (F5)" in label.text() for label in labels if label.isVisible())
    assert window.inspector.markdown() == ""


def test_the_round_under_the_cursor(shown: MainWindow) -> None:
    view = shown.inspector
    assert view.title.text() == "Round 1 · sequence 1 · newest"
    shown.feed.move_cursor(Position(shown.feed.run, 1, 1, 2))
    assert view.title.text() == "Round 1 · sequence 1"
    assert view.tokens.currentIndex().row() == 1
    assert cells(view, 0) == {
        "pos": "1",
        "token": " middle",
        "decision": "✗ rejected",
        "draft_p": "0.600",
        "draft_conf": "",
        "target_p": "0.250",
        "target_rank": "2",
        "target": " right",
        "target_best": "0.500",
        "target_entropy": "1.50",
        "rule_p": "0.125",
        "rule_q": "0.700",
    }
    assert cells(view, 1)["target"] == "–"
    best = view.tokens_model.index(0, NAMES.index("target_best"))
    assert best.data(Qt.ItemDataRole.ToolTipRole) == "0.5"
    assert cells(view, 2)["draft_p"] == "", "the target's own token was not drafted"
    colours = [
        view.tokens_model.index(row, NAMES.index(name)).data(Qt.ItemDataRole.ForegroundRole)
        for row, name in ((0, "decision"), (0, "target"), (1, "target"), (2, "target"))
    ]
    other = shown.panels.theme.color("replacement.line")
    assert colours == [shown.panels.theme.color("rejected.line"), other, None, None]


def test_a_row_moves_the_cursor_and_shows_its_alternatives(shown: MainWindow) -> None:
    view = shown.inspector
    shown.feed.move_cursor(Position(shown.feed.run, 1, 1, None))
    assert view.tokens.currentIndex().row() == 0, "the rejection first"
    assert view.tops_model.rowCount() == 4
    view.tokens.selectRow(2)
    assert view.tops_model.rowCount() == 3
    assert view.tokens.currentIndex().row() == 2, "the cursor that comes back keeps the row"
    area = shown.tokens.areas[1]
    assert area.stream is not None
    assert area.stream.position(area.current) == 1


def test_a_replacement_is_another_token_than_the_one_it_replaced(
    shown: MainWindow, qtbot: QtBot
) -> None:
    """They have one position: a click, and a row of the table, choose one of the two."""
    view, area = shown.inspector, shown.tokens.areas[1]
    assert area.stream is not None
    settle(qtbot)
    for row, kind in ((2, "replacement"), (0, "rejected"), (2, "replacement")):
        span, y = next(
            (span, y)
            for span, y in area._spans_in_sight()
            if area.stream.facts(span.token)["kind"] == kind
        )
        at = QPoint(round(span.x + span.width / 2) + MARGIN, y + area._metrics.row_height // 2)
        qtbot.mouseClick(area.viewport(), Qt.MouseButton.LeftButton, pos=at)
        assert view.tokens.currentIndex().row() == row
        assert cells(view, row)["decision"].endswith(kind)
    view.tokens.selectRow(0)
    assert area.stream.facts(area.current)["kind"] == "rejected"
    view.tokens.selectRow(2)
    assert area.stream.facts(area.current)["kind"] == "replacement"


def test_choosing_a_row_holds_the_newest_round(shown: MainWindow) -> None:
    shown.inspector.tokens.selectRow(1)
    assert shown.inspector.title.text() == "Round 1 · sequence 1"
    assert shown.tokens.areas[1].current >= 0


def test_keys_walk_over_rounds(window: MainWindow, qtbot: QtBot) -> None:
    show_trace(window, sample_trace(rounds=6, n_seqs=2).store)
    window.feed.move_cursor(Position(window.feed.run, 1, 3, None))
    for key, title in (
        (Qt.Key.Key_BracketRight, "Round 4 · sequence 1"),
        (Qt.Key.Key_BracketLeft, "Round 3 · sequence 1"),
        (Qt.Key.Key_BracketLeft, "Round 2 · sequence 1"),
        (Qt.Key.Key_BracketLeft, "Round 1 · sequence 1"),
        (Qt.Key.Key_BracketLeft, "Round 1 · sequence 1"),
    ):
        qtbot.keyClick(window, key)
        qtbot.waitUntil(lambda expected=title: window.inspector.title.text() == expected)
    assert window.tokens.areas[1].current >= 0


def test_enter_on_a_token_opens_the_inspector(window: MainWindow, qtbot: QtBot) -> None:
    show_trace(window, judged())
    window.docks["inspector"].close()
    area = window.tokens.areas[1]
    qtbot.keyClick(window, Qt.Key.Key_N)
    assert area.current >= 0
    assert not window.docks["inspector"].isVisible()
    qtbot.keyClick(area, Qt.Key.Key_Return)
    assert window.docks["inspector"].isVisible()
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 1 · sequence 1")


def test_copying_a_round(shown: MainWindow) -> None:
    shown.feed.move_cursor(Position(shown.feed.run, 1, 1, None))
    shown.docks["inspector"].close()
    shown.feed.move_cursor(Position(shown.feed.run, 0, 1, None))
    shown.actions_by_id["file.copy_step"].trigger()
    text = QGuiApplication.clipboard().text()
    assert text.startswith("### Round 1 · sequence 0"), "hidden it copies the cursor's round too"


def test_the_newest_round_is_shown_as_rounds_come(window: MainWindow, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=2)
    show_trace(window, builder.store)
    builder.plain(" x")
    window.feed.refresh()
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 3 · sequence 0 · newest")
    window.feed.move_cursor(Position(window.feed.run, 0, 1, None))
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 1 · sequence 0")
    builder.plain(" y")
    window.feed.refresh()
    settle(qtbot)
    assert window.inspector.title.text() == "Round 1 · sequence 0"
    window.feed.move_cursor(None)
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 4 · sequence 0 · newest")


def test_a_reopened_trace_tells_the_same(window: MainWindow, tmp_path: Path) -> None:
    store = judged()
    export_csv(store, tmp_path / "trace")
    again = open_trace(tmp_path / "trace")
    show_trace(window, again)
    window.feed.move_cursor(Position(window.feed.run, 1, 1, None))
    assert window.inspector.markdown() == step_markdown(step_of(store))


@pytest.mark.parametrize("width", [330, 520, 1100])
@pytest.mark.thinned(4)
def test_what_the_table_has_no_room_for_is_told_below(
    shown: MainWindow, qtbot: QtBot, width: int
) -> None:
    view, dock = shown.inspector, shown.docks["inspector"]
    dock.setFloating(True)
    dock.resize(width, 700)
    shown.feed.move_cursor(Position(shown.feed.run, 1, 1, 1))
    settle(qtbot)
    table = view.tokens
    filled = [i for i, name in enumerate(NAMES) if name != "draft_conf"]
    seen = [i for i in range(len(NAMES)) if not table.isColumnHidden(i)]
    assert seen == filled[: len(seen)]
    assert NAMES.index("decision") in seen
    right = max(table.columnViewportPosition(i) + table.columnWidth(i) for i in seen)
    assert right <= table.viewport().width()
    assert not table.horizontalScrollBar().isVisible()
    assert (seen == filled) is (width == 1100)
    assert view.rest.isHidden() is (width == 1100)
    if width == 330:
        assert breakable(view.rest.text()).endswith(
            "argmax “ right” p 0.500 · entropy 1.50 nats · rule p 0.125 · rule q 0.700"
        )
        assert "entropy 1.5 nats: Entropy of" in breakable(view.rest.toolTip())
        view.tokens.selectRow(1)
        assert view.rest.isHidden(), "no figures of a token that was not judged"


def test_facts_stay_together_in_a_wide_panel(shown: MainWindow, qtbot: QtBot) -> None:
    view, dock = shown.inspector, shown.docks["inspector"]
    dock.setFloating(True)
    dock.resize(1200, 700)
    settle(qtbot)
    assert view.facts.width() <= 56 * view.fontMetrics().averageCharWidth() + 8
    assert view.facts.x() < 20, "at the left, not in the middle"
    dock.resize(330, 700)
    settle(qtbot)
    assert view.facts.width() > 250, "a narrow panel is used up"


def test_a_block_and_the_confidences_of_its_drafter(window: MainWindow) -> None:
    store = judged()
    base = {"run_id": 0, "round": 2, "seq_id": 1}
    for i, sure in enumerate((0.9, 0.25)):
        drafted = {"token_id": 50, "draft_index": i, "draft_p": 0.5, "draft_conf": sure}
        store.tokens.append(**base, pos=9 + i, kind="accepted", **drafted)
    store.drafts.append(
        **base, drafter="draft-dspark", num_draft_tokens=2, block_length=5, confidence=0.575
    )
    store.rounds.append(**base, pos0=8, num_draft_tokens=2, num_accepted_draft_tokens=2)
    show_trace(window, store)
    view, conf = window.inspector, NAMES.index("draft_conf")
    window.feed.move_cursor(Position(window.feed.run, 1, 2, None))
    assert not view.tokens.isColumnHidden(conf)
    assert [cells(view, row)["draft_conf"] for row in (0, 1)] == ["0.900", "0.250"]
    facts = {label: (value, tip) for label, value, tip in view.facts_model.rows}
    assert facts["block"][0] == "● □□□□ at 8–12"
    assert facts["confidence"][0] == "0.575"
    assert "confidence head" in facts["confidence"][1]
    window.feed.move_cursor(Position(window.feed.run, 1, 1, None))
    assert view.tokens.isColumnHidden(conf), "another round has none"
