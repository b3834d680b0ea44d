"""The view around the token areas: sequences side by side, states, following, copying."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QScreen
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.looks import Theme
from app.panels.tokens.end_card import COMPARE, NextStep, RunEnd
from app.panels.tokens.tokens_view import TokensView
from app.trace_models.run_rows import Position
from engine.trace.facts import ForkOrigin
from engine.trace.run_ref import RunRef
from tests.support.trace_builder import TraceBuilder, repeated, sample_trace


@pytest.fixture
def view(qtbot: QtBot) -> TokensView:
    view = TokensView(Theme("dark"))
    qtbot.addWidget(view)
    view.resize(700, 260)
    view.show()
    qtbot.waitExposed(view)
    return view


def words(view: TokensView) -> str:
    page = view.currentWidget()
    return " ".join(label.text() for label in page.findChildren(QLabel) if label.isVisible())


def test_what_is_shown_before_there_are_tokens(view: TokensView) -> None:
    assert "Press Run (F5)" in words(view)
    builder = TraceBuilder()
    view.show_run(builder.run)
    assert "Processing the prompt" in words(view)
    builder.prompt(["a"])
    view.refresh()
    assert list(view.areas) == [0]
    assert view.areas[0].isVisible()
    view.show_run(None)
    assert "Press Run (F5)" in words(view)
    assert view.areas == {}
    assert view.copy_text() == ""


def test_a_run_that_ended_without_tokens_says_why(view: TokensView) -> None:
    builder = TraceBuilder()
    view.show_run(builder.run)
    builder.run.facts.update({"stops": ["failed"], "error": "It broke."})
    view.refresh()
    assert "The run failed: It broke." in words(view)
    view.show_run(builder.run)
    assert "The run failed: It broke." in words(view), "also when it is chosen later"


def test_a_proxy_waits_for_a_client(view: TokensView) -> None:
    builder = TraceBuilder()
    builder.run.facts["listens_at"] = "http://127.0.0.1:8081"
    view.show_run(builder.run)
    assert "Waiting for a client" in words(view) and "http://127.0.0.1:8081" in words(view)
    builder.run.facts["stops"] = []
    view.refresh()
    assert "No client sent a request." in words(view)


def test_a_client_that_streams_nothing_is_not_waited_for(view: TokensView) -> None:
    builder = TraceBuilder()
    builder.run.facts.update({"listens_at": "http://127.0.0.1:8081", "requests": [{"seq_id": 0}]})
    view.show_run(builder.run)
    assert "Nothing is streamed yet" in words(view)
    builder.run.facts.update({"stops": ["limit"], "source": {"engine": "llama-server"}})
    view.refresh()
    assert "llama-server does not report the tokens" in words(view)


def test_replies_without_tokens_show_their_texts_and_say_what_is_missing(view: TokensView) -> None:
    builder = TraceBuilder()
    source = {"source": {"engine": "lm-studio"}}
    builder.run.facts.update(source | {"requests": [{"text": "Once\nupon"}], "stops": ["stop"]})
    view.show_run(builder.run)
    assert "lm-studio does not report the tokens." in words(view)
    assert view.copy_text() == "Once\nupon"
    builder.run.facts["requests"] = [{"text": "one"}, {}, {"text": "two"}]
    view.show_run(builder.run)
    assert view.copy_text() == "Reply 0\none\n\nReply 2\ntwo"
    view.show_run(TraceBuilder().run)
    assert "Processing the prompt" in words(view) and view.copy_text() == ""


def test_a_reply_of_ids_without_pieces_has_its_text_above_them(view: TokensView) -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.run.facts["requests"] = [{"text": "what they say"}]
    view.show_run(builder.run)
    assert "text: what they say" in words(view)


def test_sequences_stand_side_by_side(view: TokensView) -> None:
    builder = sample_trace(rounds=20, n_seqs=3)
    view.show_run(builder.run)
    QApplication.processEvents()
    places = [view.areas[seq_id].mapTo(view, view.areas[seq_id].pos()) for seq_id in range(3)]
    assert places[0].x() < places[1].x() < places[2].x()
    assert "seq 2 · " in words(view)


def test_many_sequences_scroll_and_the_card_takes_a_line_in_a_low_view(
    view: TokensView, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QScreen, "availableGeometry", lambda _: QRect(0, 0, 960, 540))
    line = view.fontMetrics().height()
    end = RunEnd("It ended.", ("9 tokens",), None, False, NextStep(COMPARE, "See."), "Equal.")
    view.show_run(sample_trace(rounds=20, n_seqs=8).run)
    view.end_card.show_end(end, can_measure=True, can_compare=True)
    QApplication.processEvents()
    assert view.minimumSizeHint().height() <= 540 * 0.28 + 6 * line
    view.resize(960, view.minimumSizeHint().height())
    QApplication.processEvents()
    assert view.end_card.height() <= 3 * line
    assert view.areas[7].visibleRegion().isEmpty()
    last = view.areas[7].stream
    assert last is not None
    view.set_cursor(Position(last.run, 7, 3, 0))
    qtbot.waitUntil(lambda: view.areas[7].visibleRegion().boundingRect().height() > line)
    view.resize(960, 60 * line)
    QApplication.processEvents()
    assert view.end_card.figures.isVisible()
    assert all(area.height() > 5 * line for area in view.areas.values())


def test_one_sequence_needs_no_title(view: TokensView) -> None:
    builder = sample_trace(rounds=5)
    view.show_run(builder.run)
    assert words(view) == ""


def test_what_another_engine_was_sent_is_shown_over_its_text(view: TokensView) -> None:
    builder = TraceBuilder()
    builder.draft(["a"], "b")
    builder.draft(["c"], "d", seq_id=1)
    told = {"messages": [{"role": "user", "content": "and this"}]}
    builder.run.facts["requests"] = [{"prompt": "def f(\n  x):"}, told]
    view.show_run(builder.run)
    assert "seq 0 · 2 tokens · prompt: def f( x):" in words(view)
    assert "prompt: and this" in words(view)
    view.show_run(sample_trace(rounds=5).run)
    assert "prompt" not in words(view)


def test_tokens_arrive(view: TokensView) -> None:
    builder = TraceBuilder()
    builder.prompt(["def"])
    view.show_run(builder.run)
    builder.draft([" f", "("], "):")
    assert view.copy_text() == ""
    view.refresh()
    assert view.copy_text() == " f():"


def test_a_long_trace_is_read_by_itself(view: TokensView, qtbot: QtBot) -> None:
    builder = repeated(sample_trace(rounds=100), 60)
    view.show_run(builder.run)
    stream = view.areas[0].stream
    assert stream is not None
    n_rows = len(builder.store.tokens)
    assert len(stream) < n_rows
    qtbot.waitUntil(lambda: stream.rows[-1] == n_rows - 1)


def test_ghosts_and_follow_reach_every_sequence(view: TokensView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=60, n_seqs=2)
    view.toggle_ghosts(False)
    view.show_run(builder.run)
    QApplication.processEvents()
    bars = [area.verticalScrollBar() for area in view.areas.values()]
    rows = [bar.maximum() for bar in bars]
    view.toggle_ghosts(True)
    assert all(bar.maximum() > before for bar, before in zip(bars, rows, strict=True))

    with qtbot.waitSignal(view.follow_changed) as signal:
        bars[1].setValue(0)
    assert signal.args == [False]
    view.set_follow(False)  # the window's action answers; the other sequence is left alone
    assert view.areas[0].follow
    with qtbot.waitSignal(view.follow_changed) as signal:
        view.set_follow(True)
    assert signal.args == [True]
    assert all(bar.value() == bar.maximum() for bar in bars)


def test_a_new_run_begins_at_its_end_again(view: TokensView) -> None:
    first = sample_trace(rounds=60)
    view.show_run(first.run)
    view.set_follow(False)
    second = TraceBuilder(first.store)
    second.prompt(["fresh"])
    view.show_run(RunRef(first.store, second.run_id))
    assert view.follow
    assert view.areas[0].stream is not None
    assert view.areas[0].stream.texts == ["fresh"]


def test_copying_prefers_the_sequence_in_use(view: TokensView) -> None:
    builder = TraceBuilder()
    for seq_id, text in enumerate((" zero", " one")):
        builder.prompt(["p"], seq_id)
        builder.plain(text, seq_id)
    view.show_run(builder.run)
    assert view.copy_text() == " zero"
    view.set_cursor(Position(builder.run, 1, 1, None))
    assert view.copy_text() == " one"


def test_positions_pass_through(view: TokensView, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=10, n_seqs=2)
    view.show_run(builder.run)
    with qtbot.waitSignal(view.position_selected) as signal:
        view.areas[1].step_rejection(+1)
    position = signal.args[0]
    assert position.seq_id == 1
    view.set_cursor(position)
    assert view.areas[0].current == -1
    assert view.areas[1].current >= 0


def test_rejections_of_all_sequences_are_walked(view: TokensView) -> None:
    builder = sample_trace(rounds=10, n_seqs=2)
    view.show_run(builder.run)
    view.position_selected.connect(view.set_cursor)
    walked = []
    for step in (+1, -1):
        places = []
        while (place := view._place()) not in places:
            places.append(place)
            view.step_rejection(step)
        walked.append([place for place in places if place is not None])
    forth, back = walked
    assert {seq_id for seq_id, _ in forth} == {0, 1}
    assert back == forth[::-1] and len(forth) == len(set(forth)) > 3


@pytest.mark.parametrize("width", [240, 900])
def test_the_legend_takes_the_room_it_needs(view: TokensView, qtbot: QtBot, width: int) -> None:
    builder = sample_trace(rounds=5)
    view.show_run(builder.run)
    view.resize(width, 300)
    QApplication.processEvents()
    legend = view._legend
    assert legend.height() == legend.heightForWidth(legend.width())
    theme = Theme("dark")
    image = legend.grab().toImage()
    found = {
        image.pixelColor(x, y).name() for x in range(image.width()) for y in range(image.height())
    }
    wanted = ("accepted.tint", "rejected.tint", "replacement.line", "replayed.line")
    assert {theme.color(role).name() for role in wanted} <= found


def test_a_theme_reaches_areas_and_legend(view: TokensView) -> None:
    builder = sample_trace(rounds=5)
    view.show_run(builder.run)
    light = Theme("light")
    view._theme.become("light")
    for widget in (view.areas[0].viewport(), view._legend):
        image = widget.grab().toImage()
        tint = light.color("accepted.tint")
        assert any(
            image.pixelColor(x, y) == tint
            for x in range(image.width())
            for y in range(image.height())
        )


def test_a_trace_without_a_run_is_empty(view: TokensView) -> None:
    view.show_run(None)
    assert "Press Run (F5)" in words(view)


def next_run(builder: TraceBuilder) -> tuple[TraceBuilder, RunRef]:
    """Another run of the same trace, without a row yet."""
    second = TraceBuilder(builder.store)
    return second, RunRef(builder.store, second.run_id)


def test_panels_are_taken_over_by_a_run_of_the_same_sequences(view: TokensView) -> None:
    first = sample_trace(rounds=6, n_seqs=2)
    view.show_run(first.run)
    areas = view.areas
    second, run = next_run(first)
    view.show_run(run)
    assert view.areas == {} and view.copy_text() == "", "nothing of the run before is left in them"
    for seq_id, text in enumerate((" zero", " one")):
        second.prompt(["p"], seq_id)
        second.plain(text, seq_id)
    view.refresh()
    assert view.areas == areas, "the same widgets"
    assert [area.copy_text() for area in view.areas.values()] == [" zero", " one"]
    third, run = next_run(first)
    view.show_run(run)
    third.prompt(["p"])
    view.refresh()
    assert list(view.areas) == [0] and view.areas[0] is not areas[0]
    assert "Sequence" not in words(view)


def test_a_run_that_soon_has_tokens_does_not_say_what_it_waits_for(
    view: TokensView, qtbot: QtBot
) -> None:
    first = sample_trace(rounds=6)
    view.show_run(first.run)
    page = view.currentWidget()
    second, run = next_run(first)
    view.show_run(run)
    assert view.currentWidget() is page and view._late.interval() == 250
    second.prompt(["p"])
    view.refresh()
    assert view.currentWidget() is page and not view._late.isActive()
    _, run = next_run(first)
    view.show_run(run)
    assert "Processing the prompt" not in words(view)
    qtbot.waitUntil(lambda: "Processing the prompt" in words(view))
    assert view.areas == {}


@pytest.mark.parametrize("width", [900, 300])
def test_a_fork_has_its_parents_text_next_to_it_level_at_its_round(
    view: TokensView, qtbot: QtBot, width: int
) -> None:
    """Also where the fork has more rows before its round, here ghosts of a longer prompt."""
    view.resize(width, 260)
    parent = sample_trace(rounds=60)
    fork = TraceBuilder(parent.store)
    fork.prompt(["\n"] * 8)
    for n in range(90):
        fork.plain(f"word {n}\n" if n % 3 == 0 else "other ")
    fork.run.facts.fork = ForkOrigin(parent=parent.run.run_id, round=9)
    view.show_run(fork.run)
    (panel,) = view._panels.values()
    assert panel.before.isVisible() and panel.before.stream.run == parent.run
    for title in ("run 0 · seq 0 · 141 tokens", "run 1 · seq 0 · 90 tokens"):
        assert title in words(view)
    is_wide = (
        panel.mapTo(view, panel.area.mapTo(panel, panel.area.pos())).y()
        == panel.mapTo(view, panel.before.mapTo(panel, panel.before.pos())).y()
    )
    assert is_wide == (width == 900)

    def tops() -> set[int]:
        return {
            area.top_of(area.stream.round_span(9)[0]) - area.verticalScrollBar().value()
            for area in (panel.area, panel.before)
        }

    qtbot.waitUntil(lambda: panel.before.verticalScrollBar().value() > 0)
    assert panel.area.follow, "the parent's text does not move that of the fork by itself"
    panel.area.set_follow(False)
    for moved in (panel.area, panel.before):
        at = moved.top_of(moved.stream.round_span(9)[0])
        moved.verticalScrollBar().setValue(at - 20)
        qtbot.waitUntil(lambda: len(tops()) == 1)
    view.show_run(parent.run)
    QApplication.processEvents()
    assert not panel.before.isVisible() and words(view) == ""
