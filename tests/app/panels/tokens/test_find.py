"""Finding tokens in the streams, and sequences as tiles or tabs, in the real window."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.window.window import MainWindow
from tests.support.trace_builder import TraceBuilder, sample_trace


@pytest.fixture
def builder() -> TraceBuilder:
    return sample_trace(rounds=30, n_seqs=2)


@pytest.fixture
def shown(window: MainWindow, builder: TraceBuilder) -> MainWindow:
    window.panels.show_tokens(True)
    window.feed.show_run(builder.run)
    QApplication.processEvents()
    return window


def ask(qtbot: QtBot, window: MainWindow, query: str) -> None:
    window.actions_by_id["go.find"].trigger()
    window.tokens.find_bar.line.clear()
    qtbot.keyClicks(window.tokens.find_bar.line, query)


def kind_at_cursor(window: MainWindow) -> tuple[int, str]:
    for seq_id, area in window.tokens.areas.items():
        if area.current >= 0 and area.stream is not None:
            return seq_id, area.stream.facts(area.current)["kind"]
    return -1, ""


def test_hits_are_counted_and_walked_through(shown: MainWindow, qtbot: QtBot) -> None:
    bar = shown.tokens.find_bar
    ask(qtbot, shown, "rejected")
    kinds = shown.tokens.areas[0].stream.store.tokens.texts("kind")  # type: ignore[union-attr]
    n = kinds.count("rejected")
    assert bar.count.text() == f"{n} hits"
    qtbot.keyClick(bar.line, Qt.Key.Key_Return)
    assert bar.count.text() == f"1 of {n}"
    assert kind_at_cursor(shown) == (0, "rejected")
    qtbot.keyClick(bar.line, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    assert bar.count.text() == f"{n} of {n}", "before the first comes the last"
    assert kind_at_cursor(shown) == (1, "rejected")
    shown.actions_by_id["go.find_next"].trigger()
    assert bar.count.text() == f"1 of {n}"


def test_hidden_hits_are_walked_through_too(shown: MainWindow, qtbot: QtBot) -> None:
    shown.tokens.toggle_ghosts(False)
    ask(qtbot, shown, "rejected")
    for step, at in ((+1, 1), (+1, 2), (+1, 3), (-1, 2), (-1, 1)):
        shown.tokens.step_hit(step)
        assert shown.tokens.find_bar.count.text().startswith(f"{at} of")
        assert kind_at_cursor(shown)[1] not in ("rejected", "ignored")


def test_a_wrong_query_is_told_in_place(shown: MainWindow, qtbot: QtBot) -> None:
    bar = shown.tokens.find_bar
    ask(qtbot, shown, "depth>two")
    assert bar.error.isVisible()
    assert "number" in bar.error.text()
    assert bar.count.text() == ""
    ask(qtbot, shown, "depth>1000")
    assert not bar.error.isVisible()
    assert bar.count.text() == "no hits"
    assert not bar.next_button.isEnabled()


def test_hits_are_painted_until_the_bar_is_closed(shown: MainWindow, qtbot: QtBot) -> None:
    area = shown.tokens.areas[0]
    ask(qtbot, shown, "accepted")
    with_hits = area.viewport().grab().toImage()
    area.set_hits(shown.tokens._hits[0][:0])
    assert area.viewport().grab().toImage() != with_hits
    qtbot.keyClick(shown.tokens.find_bar.line, Qt.Key.Key_Escape)
    assert not shown.tokens.find_bar.isVisible()
    assert area.hasFocus()


def test_new_tokens_are_searched_as_they_come(
    shown: MainWindow, builder: TraceBuilder, qtbot: QtBot
) -> None:
    ask(qtbot, shown, "zebra")
    assert shown.tokens.find_bar.count.text() == "no hits"
    builder.draft([" zeb"], "ra", seq_id=1)
    shown.feed.refresh()
    qtbot.waitUntil(lambda: shown.tokens.find_bar.count.text() == "1 hit")


def test_tabs_bring_the_sequence_of_a_hit_to_the_front(shown: MainWindow, qtbot: QtBot) -> None:
    areas = shown.tokens.areas
    assert areas[0].isVisible() and areas[1].isVisible()
    shown.actions_by_id["view.tabs"].trigger()
    assert shown.settings.tabs
    assert areas[0].isVisible() and not areas[1].isVisible()
    ask(qtbot, shown, "seq:1 accepted")
    shown.actions_by_id["go.find_next"].trigger()
    assert areas[1].isVisible() and not areas[0].isVisible()
    assert kind_at_cursor(shown) == (1, "accepted")
    shown.actions_by_id["view.tabs"].trigger()
    QApplication.processEvents()
    assert areas[0].isVisible() and areas[1].isVisible()


def test_many_sequences_make_rows(window: MainWindow) -> None:
    builder = sample_trace(rounds=3, n_seqs=4)
    window.panels.show_tokens(True)
    window.feed.show_run(builder.run)
    QApplication.processEvents()
    places = [a.mapTo(window, a.rect().topLeft()) for a in window.tokens.areas.values()]
    assert places[0].y() == places[1].y() < places[2].y() == places[3].y()
    assert places[0].x() == places[2].x() < places[1].x() == places[3].x()
