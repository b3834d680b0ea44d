"""One round read from the trace: its rows, facts, alternatives, its line and its Markdown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt

from app.looks import Theme
from app.panels.inspector.inspector_view import step_line, step_line_tip, step_markdown
from app.panels.inspector.step_facts import (
    Step,
    neighbour,
    newest_round,
    outcome,
    read_step,
    step_facts,
)
from app.panels.inspector.step_table import COLUMNS, TopTable, alternatives, cell_text
from engine.trace.run_ref import RunRef
from tests.support.judged_round import breakable, judged, step_of
from tests.support.trace_builder import TraceBuilder, sample_trace

NAMES = [column.name for column in COLUMNS]


def facts_of(step: Step) -> dict[str, str]:
    return {label: value for label, value, _ in step_facts(step)}


def test_a_step_has_the_rows_of_its_round_and_sequence() -> None:
    step = step_of(judged())
    assert [token["kind"] for token in step.tokens] == ["rejected", "ignored", "replacement"]
    assert step.n_replayed == 1
    assert [one["ubatch"] for one in step.ubatches] == [0, 2]
    assert read_step(RunRef(step.store, 0), 1, 9) is None
    assert read_step(RunRef(step.store, 1), 1, 1) is None


def test_rounds_next_to_a_round() -> None:
    store = sample_trace(rounds=3, n_seqs=2).store
    TraceBuilder(store).plain("x")
    assert newest_round(RunRef(store, 0)) == (1, 3)
    assert newest_round(RunRef(store, 1)) == (0, 0)
    assert newest_round(RunRef(store, 2)) is None
    assert neighbour(RunRef(store, 0), 1, 1, +1) == 2
    assert neighbour(RunRef(store, 0), 1, 3, +1) is None
    assert neighbour(RunRef(store, 0), 1, 3, -1) == 2
    assert neighbour(RunRef(store, 0), 1, 1, -1) is None


def test_facts_and_outcome() -> None:
    step = step_of(judged())
    facts = facts_of(step)
    assert facts["ngram-mod"] == "2 tokens, 5 before trimming, match at 1,234, limit"
    assert facts["ubatch 2"] == "verify 1 × 3, padding 2, all tokens"
    assert facts["path"] == "restore_depth"
    assert facts["depth"] == "2, in memory 3"
    assert facts["valid depth / n_rs_seq"] == "1 / 1"
    assert facts["rs_idx"] == "0 → 1"
    assert facts["written"] == "1.43 MiB"
    assert facts["copied"] == "–", "not observed is not a zero"
    assert facts["KV cells / duplicates"] == "18 / –"
    assert facts["all phases"] == "3.50 ms"
    assert outcome(step) == (
        "2 drafted, 0 accepted, 1 emitted (rule rejection): "
        "the draft has “middle”, the target chose “right”."
    )


def test_a_drafted_end_token_is_told() -> None:
    step = step_of(judged())
    own = next(one for one in step.tokens if one["kind"] == "replacement")
    ended = replace(step, tokens=({**own, "draft_index": 0},))
    assert outcome(ended).endswith(": the drafted “right” counts as the target's own token.")


def test_alternatives_are_the_union_of_both_sides() -> None:
    token = step_of(judged()).tokens[0]
    found = [(i, q, p) for i, q, p, _ in alternatives(token)]
    assert [ids for ids, _, _ in found] == [51, 50, 52, 53]
    assert found[0][1] is None
    assert found[1][1:] == (pytest.approx(0.6), 0.25)
    assert found[3][2] is None
    beyond = {**token, "token_id": 54, "target_p": 0.01}
    assert (54, None, 0.01, False) in alternatives(beyond), "its p is known although others lead"


def test_what_the_grammar_forbids_is_marked() -> None:
    store = judged()
    token = dict(step_of(store).tokens[0])
    assert not any(forbidden for *_, forbidden in alternatives(token))
    token |= {"target_top_forbidden": [1, 0, None, None, None]}
    token |= {"draft_top_forbidden": [0, 1, None, None, None]}
    found = {i: forbidden for i, _, _, forbidden in alternatives(token)}
    assert found == {51: True, 50: False, 52: False, 53: True}
    step = replace(step_of(store), tokens=(token,))
    assert cell_text(step, token, "target") == "⊘  right"
    table = TopTable(Theme("dark"))
    table.show_token(step, 0)
    texts = [table.cell(row, "token", Qt.ItemDataRole.DisplayRole) for row in range(4)]
    assert texts[0] == "⊘  right"
    assert [text.startswith("⊘") for text in texts] == [True, False, False, True]
    assert "grammar" in table.cell(0, "token", Qt.ItemDataRole.ToolTipRole)
    assert "grammar" not in table.cell(1, "token", Qt.ItemDataRole.ToolTipRole)


def test_the_line_below_the_table_in_words() -> None:
    step = step_of(judged())
    rejected, ignored, replacement = step.tokens
    assert breakable(step_line(step, rejected, NAMES)) == (
        "pos 1 · token “ middle” · decision ✗ rejected · draft q 0.600 · target p 0.250 · rank 2"
        " · argmax “ right” p 0.500 · entropy 1.50 nats · rule p 0.125 · rule q 0.700"
    )
    rest = NAMES[NAMES.index("target_best") :]
    assert breakable(step_line(step, rejected, rest)).startswith(
        "argmax p 0.500 · entropy 1.50 nats"
    )
    rest = NAMES[NAMES.index("target") :]
    assert step_line(step, ignored, rest) == "", "the target did not judge it"
    own = breakable(step_line(step, replacement, NAMES))
    assert "draft q" not in own, "the target's own token was not drafted"
    assert "rule q" not in own
    figures = NAMES[NAMES.index("target_best") :]
    assert all(" " not in part for part in step_line(step, rejected, figures).split(" · "))
    assert step_line(step, rejected, []) == ""


def test_the_tip_of_the_line_has_a_meaning_and_all_digits_for_each_part() -> None:
    step = step_of(judged())
    token = {**step.tokens[0], "target_top_p": [1 / 3], "rule_p": None}
    tips = {column.name: column.tip for column in COLUMNS}
    lines = breakable(step_line_tip(step, token, NAMES[NAMES.index("target_rank") :])).splitlines()
    assert lines == [
        f"rank: {tips['target_rank']}",
        f"argmax: {tips['target']}",
        f"argmax p 0.333333333: {tips['target_best']}",
        f"entropy 1.5 nats: {tips['target_entropy']}",
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
