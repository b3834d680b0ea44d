"""A conversation in the window, with the bundled model: continued, edited, branched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from pytestqt.qtbot import QtBot

from app.engine_thread.bridge import Bridge
from app.engine_thread.events import State
from app.panels.conversation.conversation_view import summary_words
from app.window.window import MainWindow
from engine.conversation.turns import CheckpointHistory, CheckpointMark, TurnTree
from engine.trace.export import export_csv
from engine.trace.run_ref import RunRef
from tests.support.window_acts import messages

TEXT = "def quicksort(arr):\n" + "    # sorts the list and gives it back\n" * 6


@pytest.fixture
def demo(make_window: Callable[..., MainWindow], qtbot: QtBot) -> MainWindow:
    window = make_window(Bridge())
    window.open_demo()
    qtbot.waitUntil(lambda: window.bridge.state is State.READY)
    window.run_panel.n_predict.setValue(12)
    window.docks.reveal("conversation")
    return window


def say(window: MainWindow, qtbot: QtBot, text: str, *, by_key: bool = False) -> None:
    view = window.panels.conversation
    if text:
        view.box.setPlainText(text)
    n_runs = len(window.bridge.session_store.runs)
    if by_key:
        view.box.setFocus()
        qtbot.keyClick(view.box, Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier)
    else:
        view.say.click()
    qtbot.waitUntil(lambda: len(window.bridge.session_store.runs) > n_runs)
    qtbot.waitUntil(lambda: window.bridge.state is State.READY, timeout=60_000)


@pytest.mark.parametrize("n", [1, 2])
def test_checkpoints_are_counted(n: int) -> None:
    words = summary_words(CheckpointHistory([CheckpointMark(6 + i, 1024, 0) for i in range(n)]))
    assert words.startswith(f"{n} context checkpoint{'s' * (n - 1)} ({n} KiB)")


def shown(window: MainWindow) -> list[str]:
    return [card.title.text() for card in window.panels.conversation.cards if card.isVisible()]


def test_a_conversation_is_continued_edited_and_branched(demo: MainWindow, qtbot: QtBot) -> None:
    view = demo.panels.conversation
    assert not view.say.isEnabled() and "empty" in view.say.toolTip()
    assert view.empty.isVisible() and "plain text" in view.how.text()
    say(demo, qtbot, TEXT)
    assert shown(demo) == ["Turn 1"] and view.box.toPlainText() == ""
    assert "0 of" in view.cards[0].facts.text() and "had no text" in view.cards[0].facts.text()
    say(demo, qtbot, "\n\nclass A:\n", by_key=True)
    assert shown(demo) == ["Turn 1", "Turn 2"]
    assert "tokens reused: " in view.cards[1].facts.text()
    assert view.cards[1].answer.text()
    # an earlier turn, said otherwise
    view.cards[0].edit.click()
    assert view.box.toPlainText() == TEXT and "turn 1, as a branch" in view.how.text()
    say(demo, qtbot, TEXT + "x = 1\n")
    assert shown(demo) == ["Turn 1"] and view.cards[0].place.text() == "2/2"
    assert "context checkpoint at" in view.cards[0].facts.text()
    # one more where the first answer ended by itself
    assert re.search(r"[12] hits?, 0 misses", view.summary.text())
    marks = view.strip.accessibleDescription()
    assert "context checkpoint at" in marks and re.search("[12] hits?,", marks)
    assert "reused" in view.strip.tip_at(QPoint(1, 20))
    # back to the first version and its answer, and on from its middle
    view.cards[0].earlier.click()
    assert shown(demo) == ["Turn 1", "Turn 2"]
    view.cards[0].branch.click()
    assert shown(demo) == ["Turn 1"] and "After turn 1" in view.how.text()
    view.cancel.click()
    assert shown(demo) == ["Turn 1", "Turn 2"] and view.cancel.isHidden()
    view.cards[0].branch.click()
    say(demo, qtbot, "\n\nclass B:\n")
    assert shown(demo) == ["Turn 1", "Turn 2"] and view.cards[1].place.text() == "2/2"
    tree = TurnTree.of(demo.bridge.session_store.runs, 0)
    assert [turn.number for turn in tree.path(3)] == [0, 3]
    # every turn is a run among the others
    assert demo.feed.run is not None and demo.feed.run.run_id == 3
    view.cards[0].run.click()
    assert demo.feed.run.run_id == 0 and shown(demo) == ["Turn 1"]
    view.begin_new()
    assert view.empty.isVisible() and view.choice.currentText() == "New conversation"
    say(demo, qtbot, "x")
    assert [view.choice.itemText(i) for i in range(view.choice.count())] == [
        "Conversation 1",
        "Conversation 2",
    ]
    for name in ("light", "dark"):
        demo.appearance.set_theme(name)
        assert not view.grab().isNull()
    # the template that the model has may be asked for
    view.chat.setChecked(True)
    say(demo, qtbot, "y")
    assert demo.bridge.session_store.runs[5]["turn"]["is_chat"] is True


def test_an_edit_ends_where_another_conversation_comes_on_show(
    demo: MainWindow, qtbot: QtBot
) -> None:
    view = demo.panels.conversation
    say(demo, qtbot, "x")
    view.begin_new()
    say(demo, qtbot, "y")
    view.cards[0].edit.click()
    assert "Replaces turn 1" in view.how.text()
    demo.library.select(RunRef(demo.bridge.session_store, 0))
    assert view.choice.currentText() == "Conversation 1" and view.cancel.isHidden()
    assert view.box.toPlainText() == "" and "In place" not in view.how.text()


def test_a_conversation_of_another_trace_goes_on(
    demo: MainWindow, qtbot: QtBot, tmp_path: Path
) -> None:
    view = demo.panels.conversation
    say(demo, qtbot, "def add(a, b):")
    store = demo.bridge.session_store
    answer = store.runs[0]["turn"]["answer"]["content"]
    export_csv(store, tmp_path / "trace")
    with qtbot.waitSignal(demo.bridge.trace_shown):
        demo.sessions.open(tmp_path / "trace")
    assert shown(demo) == ["Turn 1"] and view.store is not store
    view.say.setFocus()
    say(demo, qtbot, "\n\nx = 1")
    assert demo.focusWidget() is view.box
    assert view.store is store and view.choice.currentText() == "Conversation 2"
    assert any("continues as a new one" in message for message in messages(demo))
    said = store.runs[1]["turn"]["messages"]
    assert [message["content"] for message in said] == ["def add(a, b):", answer, "\n\nx = 1"]
    # the last of these is what can be said otherwise
    view.cards[0].edit.click()
    assert view.box.toPlainText() == "\n\nx = 1"
    say(demo, qtbot, "\n\nx = 2")
    said = store.runs[2]["turn"]["messages"]
    assert [message["content"] for message in said] == ["def add(a, b):", answer, "\n\nx = 2"]
    assert view.cards[0].place.text() == "2/2"


def test_without_a_model_the_panel_says_what_is_missing(window: MainWindow) -> None:
    assert window.panels.conversation.how.text() == "Open a model first."


def test_the_number_of_checkpoints_is_chosen_in_the_panel(demo: MainWindow, qtbot: QtBot) -> None:
    view = demo.panels.conversation
    say(demo, qtbot, TEXT)
    assert view.summary.text().split()[0] != "0"
    assert view.checkpoints.summary == "32 at most"
    view.checkpoints["ctx_checkpoints"].setValue(0)
    assert view.checkpoints.summary == "at most none"
    # another cache: nothing of the turn before is left, and nothing is kept from now on
    say(demo, qtbot, "\n\nclass A:\n")
    assert "had no text" in view.cards[1].facts.text()
    assert view.summary.text().startswith("0 context checkpoints")
    say(demo, qtbot, "\n\nclass B:\n")
    assert "tokens reused: " in view.cards[2].facts.text()
    view.cards[0].edit.click()
    say(demo, qtbot, TEXT + "x = 1\n")
    assert "0 of" in view.cards[0].facts.text(), "an edit has nowhere to go on from"
