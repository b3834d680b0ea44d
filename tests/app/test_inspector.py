"""The step inspector: what it says about a round, and how it moves with the cursor."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from app.models.position import Position
from app.models.step import Step, neighbour, newest_round, read_step
from app.models.step_facts import outcome, step_facts
from app.models.step_line import step_line, step_line_tip
from app.models.step_markdown import step_markdown
from app.models.step_table import COLUMNS
from app.models.step_tops import alternatives
from app.views.inspector import InspectorView
from app.window import MainWindow
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder, sample_trace

NAMES = [column.name for column in COLUMNS]


def judged() -> TraceStore:
    """Round 1 of two sequences; sequence 1 has a rejection with everything recorded."""
    builder = TraceBuilder()
    for seq_id in (0, 1):
        builder.prompt(["p"], seq_id)
    builder.draft([" ok"], " bonus", seq_id=0)
    store = builder.store
    for token_id, piece in ((50, b" middle"), (51, b" right"), (52, b"|"), (53, b"\xe4")):
        store.pieces[token_id] = piece
    base = {"run_id": 0, "round": 1, "seq_id": 1}
    top = {"target_top_id": [51, 50, 52], "target_top_p": [0.5, 0.25, 0.1], "target_entropy": 1.5}
    store.tokens.append(
        **base, pos=1, kind="rejected", token_id=50, draft_index=0, draft_p=0.6, target_p=0.25,
        target_rank=2, rule_p=0.125, rule_q=0.7, draft_top_id=[50, 53], draft_top_p=[0.6, 0.3],
        **top,
    )  # fmt: skip
    store.tokens.append(**base, pos=2, kind="ignored", token_id=53, draft_index=1, draft_p=0.4)
    store.tokens.append(**base, pos=1, kind="replayed", token_id=50)
    store.tokens.append(
        **base, pos=1, kind="replacement", token_id=51, target_p=0.5, target_rank=1, **top
    )
    store.drafts.append(
        **base, drafter="ngram-mod", match_pos=1234, num_raw=5, num_draft_tokens=2,
        reason="limit", draft_ms=0.5,
    )  # fmt: skip
    for number, seq_ids in enumerate(("0 1", "0", "1")):
        store.ubatches.append(
            run_id=0, round=1, ubatch=number, n_seqs=len(seq_ids.split()), n_seq_tokens=3,
            seq_ids=seq_ids, n_padding=number, purpose="verify", reason="all tokens", ms=2.0,
        )  # fmt: skip
    store.rounds.append(
        **base, num_draft_tokens=2, num_accepted_draft_tokens=0, num_emitted=1,
        stop_kind="replacement", accept_rule="rejection", rollback_depth=2, memory_rollback=3,
        rollback_path="restore_depth", n_rs_seq=1, valid_depth=1, rs_idx_before=0,
        rs_idx_after=1, replay_index=1, verify_width=3, state_bytes_written=1_500_000,
        checkpoint_bytes=449_000, kv_cells_used=18, draft_ms=1.0, verify_ms=2.5,
    )  # fmt: skip
    return store


def step_of(store: TraceStore, seq_id: int = 1, round_: int = 1) -> Step:
    step = read_step(store, 0, seq_id, round_)
    assert step is not None
    return step


def plain(text: str) -> str:
    """With spaces where the line must not break."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def facts_of(step: Step) -> dict[str, str]:
    return {fact.label: fact.value for fact in step_facts(step)}


# -- models --------------------------------------------------------------------------------


def test_a_step_has_the_rows_of_its_round_and_sequence() -> None:
    step = step_of(judged())
    assert [token["kind"] for token in step.tokens] == ["rejected", "ignored", "replacement"]
    assert step.n_replayed == 1
    assert [one["ubatch"] for one in step.ubatches] == [0, 2]
    assert read_step(step.store, 0, 1, 9) is None
    assert read_step(step.store, 1, 1, 1) is None


def test_rounds_next_to_a_round() -> None:
    store = sample_trace(rounds=3, n_seqs=2).store
    TraceBuilder(store).plain("x")
    assert newest_round(store, 0) == (1, 3)
    assert newest_round(store, 1) == (0, 0)
    assert newest_round(store, 2) is None
    assert neighbour(store, 0, 1, 1, +1) == 2
    assert neighbour(store, 0, 1, 3, +1) is None
    assert neighbour(store, 0, 1, 3, -1) == 2
    assert neighbour(store, 0, 1, 1, -1) is None


def test_facts_and_outcome() -> None:
    step = step_of(judged())
    facts = facts_of(step)
    assert facts["ngram-mod"] == "2 tokens, 5 before trimming, match at 1,234, limit"
    assert facts["ubatch 2"] == "verify 1 × 3, padding 2, all tokens"
    assert facts["path"] == "restore_depth"
    assert facts["depth"] == "2, in memory 3"
    assert facts["valid depth / n_rs_seq"] == "1 / 1"
    assert facts["rs_idx"] == "0 → 1"
    assert facts["written"] == "1.5 MB"
    assert facts["copied"] == "–", "not observed is no zero"
    assert facts["KV cells / duplicates"] == "18 / –"
    assert facts["all phases"] == "3.5 ms"
    assert outcome(step) == (
        "2 drafted, 0 accepted, 1 out by rejection: the draft said “middle”, the target “right”."
    )


def test_alternatives_are_the_union_of_both_sides() -> None:
    token = step_of(judged()).tokens[0]
    found = [(one.token_id, one.q, one.p) for one in alternatives(token)]
    assert [ids for ids, _, _ in found] == [51, 50, 52, 53]
    assert found[0][1] is None
    assert found[1][1:] == (pytest.approx(0.6), 0.25)
    assert found[3][2] is None


def test_the_line_below_the_table_in_words() -> None:
    step = step_of(judged())
    rejected, ignored, replacement = step.tokens
    assert plain(step_line(step, rejected, NAMES)) == (
        "pos 1 · token “ middle” · decision ✗ rejected · draft q 0.600 · target p 0.250 · rank 2"
        " · argmax “ right” p 0.500 · entropy 1.50 nats · rule p 0.125 · rule q 0.700"
    )
    rest = NAMES[NAMES.index("target_best") :]
    assert plain(step_line(step, rejected, rest)).startswith("argmax p 0.500 · entropy 1.50 nats")
    rest = NAMES[NAMES.index("target") :]
    assert plain(step_line(step, ignored, rest)) == "argmax – · entropy – · rule p – · rule q –"
    own = plain(step_line(step, replacement, NAMES))
    assert "draft q" not in own, "the target's own token was not drafted"
    assert "rule q" not in own
    figures = NAMES[NAMES.index("target_best") :]
    assert all(" " not in part for part in step_line(step, rejected, figures).split(" · "))
    assert step_line(step, rejected, []) == ""


def test_the_tip_of_the_line_has_a_meaning_and_all_digits_for_each_part() -> None:
    step = step_of(judged())
    token = {**step.tokens[0], "target_top_p": [1 / 3], "rule_p": None}
    tips = {column.name: column.tip for column in COLUMNS}
    lines = plain(step_line_tip(step, token, NAMES[NAMES.index("target_rank") :])).splitlines()
    assert lines == [
        f"rank: {tips['target_rank']}",
        f"argmax: {tips['target']}",
        f"argmax p 0.333333333: {tips['target_best']}",
        f"entropy 1.5 nats: {tips['target_entropy']}",
        f"rule p: {tips['rule_p']}",
        f"rule q {step.tokens[0]['rule_q']:.9g}: {tips['rule_q']}",
    ]


def test_markdown_is_a_table_that_no_token_breaks() -> None:
    store = judged()
    row = {"run_id": 0, "round": 1, "seq_id": 1}
    store.tokens.append(**row, pos=3, kind="bonus", token_id=52)
    lines = step_markdown(step_of(store)).splitlines()
    assert lines[0] == "### Round 1 · sequence 1"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4
    assert {line.replace("\\|", "").count("|") for line in table} == {len(COLUMNS) + 1}
    assert "⟨E4⟩" in table[3]
    assert "- path: restore_depth" in lines
    assert "**Rollback**" in lines


# -- the view in the window ----------------------------------------------------------------


@pytest.fixture
def shown(window: MainWindow) -> MainWindow:
    show_trace(window, judged())
    return window


def show_trace(window: MainWindow, store: TraceStore) -> None:
    window.bridge.store.runs.update(store.runs)
    window._enable_actions()
    window.panels.show_tokens(True)
    window.feed.show_run(store, 0)
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
    shown.feed.move_cursor(Position(0, 1, 1, 2))
    assert view.title.text() == "Round 1 · sequence 1"
    assert view.tokens.currentIndex().row() == 1
    assert cells(view, 0) == {
        "pos": "1", "token": " middle", "decision": "✗ rejected", "draft_p": "0.600",
        "target_p": "0.250", "target_rank": "2", "target": " right", "target_best": "0.500",
        "target_entropy": "1.50", "rule_p": "0.125", "rule_q": "0.700",
    }  # fmt: skip
    assert cells(view, 1)["target"] == "–"
    best = view.tokens_model.index(0, NAMES.index("target_best"))
    assert best.data(Qt.ItemDataRole.ToolTipRole) == "0.5"
    assert cells(view, 2)["draft_p"] == "", "the target's own token was not drafted"
    colours = [
        view.tokens_model.index(row, NAMES.index(name)).data(Qt.ItemDataRole.ForegroundRole)
        for row, name in ((0, "decision"), (0, "target"), (1, "target"), (2, "target"))
    ]
    other = shown.theme.color("replacement.line")
    assert colours == [shown.theme.color("rejected.line"), other, None, None]


def test_a_row_moves_the_cursor_and_shows_its_alternatives(shown: MainWindow) -> None:
    view = shown.inspector
    shown.feed.move_cursor(Position(0, 1, 1, None))
    assert view.tokens.currentIndex().row() == 0, "the rejection first"
    assert view.tops_model.rowCount() == 4
    view.tokens.selectRow(2)
    assert view.tops_model.rowCount() == 3
    assert view.tokens.currentIndex().row() == 2, "the cursor that comes back keeps the row"
    area = shown.tokens.areas[1]
    assert area.stream is not None
    assert area.stream.position(area.current) == 1


def test_choosing_a_row_holds_the_newest_round(shown: MainWindow) -> None:
    shown.inspector.tokens.selectRow(1)
    assert shown.inspector.title.text() == "Round 1 · sequence 1"
    assert shown.tokens.areas[1].current >= 0


def test_keys_walk_over_rounds(window: MainWindow, qtbot: QtBot) -> None:
    show_trace(window, sample_trace(rounds=6, n_seqs=2).store)
    window.feed.move_cursor(Position(0, 1, 3, None))
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
    qtbot.keyClick(area, Qt.Key.Key_N)
    assert not window.docks["inspector"].isVisible()
    qtbot.keyClick(area, Qt.Key.Key_Return)
    assert window.docks["inspector"].isVisible()
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 1 · sequence 1")


def test_copying_a_round(shown: MainWindow) -> None:
    shown.feed.move_cursor(Position(0, 1, 1, None))
    shown.docks["inspector"].close()
    shown.feed.move_cursor(Position(0, 0, 1, None))
    shown.actions_by_id["file.copy_step"].trigger()
    text = QGuiApplication.clipboard().text()
    assert text.startswith("### Round 1 · sequence 0"), "hidden it copies the cursor's round too"


def test_the_newest_round_is_shown_as_rounds_come(window: MainWindow, qtbot: QtBot) -> None:
    builder = sample_trace(rounds=2)
    show_trace(window, builder.store)
    builder.plain(" x")
    window.feed.refresh()
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 3 · sequence 0 · newest")
    window.feed.move_cursor(Position(0, 0, 1, None))
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 1 · sequence 0")
    builder.plain(" y")
    window.feed.refresh()
    qtbot.wait(250)
    assert window.inspector.title.text() == "Round 1 · sequence 0"
    window.feed.move_cursor(None)
    qtbot.waitUntil(lambda: window.inspector.title.text() == "Round 4 · sequence 0 · newest")


def test_a_reopened_trace_tells_the_same(window: MainWindow, tmp_path: Path) -> None:
    store = judged()
    export_csv(store, tmp_path / "trace")
    again = open_trace(tmp_path / "trace")
    show_trace(window, again)
    window.feed.move_cursor(Position(0, 1, 1, None))
    assert window.inspector.markdown() == step_markdown(step_of(store))


@pytest.mark.parametrize("width", [330, 520, 1100])
def test_what_the_table_has_no_room_for_is_told_below(
    shown: MainWindow, qtbot: QtBot, width: int
) -> None:
    view, dock = shown.inspector, shown.docks["inspector"]
    dock.setFloating(True)
    dock.resize(width, 700)
    shown.feed.move_cursor(Position(0, 1, 1, 1))
    qtbot.wait(20)
    table = view.tokens
    seen = [i for i in range(len(NAMES)) if not table.isColumnHidden(i)]
    assert seen == list(range(len(seen)))
    assert NAMES.index("decision") in seen
    right = max(table.columnViewportPosition(i) + table.columnWidth(i) for i in seen)
    assert right <= table.viewport().width()
    assert not table.horizontalScrollBar().isVisible()
    assert (len(seen) == len(NAMES)) is (width == 1100)
    assert view.rest.isHidden() is (width == 1100)
    if width == 330:
        assert plain(view.rest.text()).endswith("argmax “ right” p 0.500 · entropy 1.50 nats "
                                                "· rule p 0.125 · rule q 0.700")  # fmt: skip
        assert "entropy 1.5 nats: Entropy of" in plain(view.rest.toolTip())
        view.tokens.selectRow(1)
        assert "rule q –" in plain(view.rest.text())
        assert "nats" not in view.rest.toolTip(), "no unit without a figure"


def test_facts_stay_together_in_a_wide_panel(shown: MainWindow, qtbot: QtBot) -> None:
    view, dock = shown.inspector, shown.docks["inspector"]
    dock.setFloating(True)
    dock.resize(1200, 700)
    qtbot.wait(20)
    assert view.facts.width() <= 56 * view.fontMetrics().averageCharWidth() + 8
    assert view.facts.x() < 20, "at the left, not in the middle"
    dock.resize(330, 700)
    qtbot.wait(20)
    assert view.facts.width() > 250, "a narrow panel is used up"
