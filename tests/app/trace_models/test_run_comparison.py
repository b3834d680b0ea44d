"""Figures of two runs, against sums by hand; where their texts part."""

from __future__ import annotations

from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.panels.runs.run_table import RunPairTable
from app.panels.runs.runs_view import RunPair
from app.trace_models import run_comparison
from app.trace_models.run_comparison import FigurePair, compare_runs
from app.trace_models.run_facts import run_row
from app.trace_models.run_rows import RunOverlay
from engine.trace.facts import RunFacts
from engine.trace.records import PHASES
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.timings import timings
from tests.support.timed_trace import timed_trace
from tests.support.trace_builder import TraceBuilder


def text_difference(store: TraceStore, first: int, second: int) -> str:
    return run_comparison.text_difference(RunRef(store, first), RunRef(store, second))


def values(store: TraceStore, first: int, second: int) -> dict[str, FigurePair]:
    return {pair.label: pair for pair in compare_runs(RunRef(store, first), RunRef(store, second))}


def test_figures_are_sums_over_the_trace() -> None:
    store, plain, drafted = timed_trace(60)
    found = values(store, drafted, plain)
    rows = [store.rounds.row(row) for row in range(len(store.rounds))]
    for place, run_id in enumerate((drafted, plain)):
        mine = [row for row in rows if row["run_id"] == run_id]
        paths = [row["rollback_path"] for row in mine]
        assert found["rounds"].values[place] == 60
        assert found["rollbacks"].values[place] == len(paths) - paths.count("none")
        assert found["restores"].values[place] == paths.count("restore")
        assert found["tokens"].values[place] == sum(row["num_emitted"] for row in mine)
        for phase in PHASES:
            total = sum(row[f"{phase}_ms"] for row in mine if row["round"])
            if phase in found:
                assert found[phase].values[place] == pytest.approx(total)
            else:
                assert not total
    speeds = [timings(store, run)["predicted_per_second"] for run in (drafted, plain)]
    assert "net speed-up" not in found, "two runs are no measurement of it"
    assert found["tokens/s"].ratio == pytest.approx(speeds[0] / speeds[1])
    assert found["acceptance"].values[1] is None
    assert found["acceptance"].ratio is None and found["acceptance"].text(1) == "–"
    assert "bytes moved" not in found, "not observed in either run"


def test_bytes_moved_are_copies_restores_and_checkpoints() -> None:
    builder = TraceBuilder()
    other = TraceBuilder(builder.store)
    for run_id, factor in ((builder.run_id, 1), (other.run_id, 2)):
        for number in range(3):  # the first one decodes the prompt, which does not count
            builder.store.rounds.append(
                run_id=run_id,
                round=number,
                seq_id=0,
                num_emitted=1,
                rollback_path="restore",
                state_bytes_copied=1000 * factor,
                state_bytes_restored=200 * factor,
                checkpoint_bytes=30 * factor * number or None,
                state_bytes_written=7_000_000,
                rollback_depth=0,
                verify_width=1,
                pos0=number,
                t_ms=1.0 + number,
            )
    moved = values(builder.store, 1, 0)["bytes moved"]
    assert moved.values == (4980, 2490)
    assert (moved.text(0), moved.text(1), moved.ratio) == ("4.86 KiB", "2.43 KiB", 2.0)


def test_a_ratio_to_nothing_is_not_told() -> None:
    assert FigurePair("restores", (3, 0), "count", "").ratio is None
    assert FigurePair("restores", (0, 4), "count", "").ratio == 0
    assert FigurePair("restores", (None, 4), "count", "").ratio is None
    assert FigurePair("tokens", (12345, 1), "count", "").text(0) == "12,345"
    assert FigurePair("draft", (12.345, 1), "ms", "").text(0) == "12.3 ms"


def run(store: TraceStore, prompt: str, *rounds: tuple[list[str], str]) -> int:
    builder = TraceBuilder(store)
    builder.prompt([prompt])
    for accepted, last in rounds:
        builder.draft(accepted, last, ["wrong"])
    return builder.run_id


def test_the_first_token_that_differs_is_named() -> None:
    store = TraceStore()
    first = run(store, "p", (["a", "b"], "c"), ([], "d"))
    same = run(store, "p", ([], "a"), (["b", "c"], "d"))
    parted = run(store, "p", (["a"], "b"), (["x"], "\n"))
    shorter = run(store, "p", (["a"], "b"))
    prompted = run(store, "q", (["a", "b"], "c"))
    empty = run(store, "p")
    assert text_difference(store, first, same) == "Same text, 4 tokens."
    assert text_difference(store, first, parted) == (
        "The texts differ at token 3, position 3: “c” in run 0, “x” in run 2."
    )
    assert text_difference(store, shorter, first) == "Same text for 2 tokens, all tokens of run 3."
    assert text_difference(store, first, prompted) == "The prompts differ, and therefore the texts."
    assert text_difference(store, first, empty) == ""


def test_of_several_sequences_the_first_that_parts_is_named() -> None:
    store = TraceStore()
    for last in ("c", "x"):
        builder = TraceBuilder(store)
        for seq_id in (0, 1):
            builder.prompt(["p"], seq_id)
            builder.draft(["a"], "b", seq_id=seq_id)
        builder.draft([], last, seq_id=1)
    assert text_difference(store, 0, 1) == (
        "The texts differ at token 3 of sequence 1, position 3: “c” in run 0, “x” in run 1."
    )


# -- figures of a run that ends while they are read ----------------------------------------


class EndsWhenAsked(RunFacts):
    """Facts of a run that ends, with one more round, just before somebody learns of its end."""

    def __init__(self, builder: TraceBuilder) -> None:
        super().__init__()
        self._builder = builder

    def _end(self, key: object) -> None:
        if key == "stops" and not dict.__contains__(self, "stops"):
            self._builder.plain(" last")
            self["stops"] = ["limit"]

    def get(self, key: str, default: Any = None) -> Any:
        self._end(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._end(key)
        return super().__contains__(key)


def test_figures_read_beside_the_end_are_the_final_ones() -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.plain(" b")
    builder.store.runs[builder.run_id] = EndsWhenAsked(builder)
    row = run_row(builder.run)
    assert (row.ended, row.tokens) == (True, 2), "or not ended: then it is read again"


@pytest.mark.parametrize("kind", ["reference", "noise", "peer noise", "policy"])
def test_lanes_that_never_draft_have_no_rollback(kind: str) -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    options = {"rollback": "planes", "spec": {"types": ["draft-mtp"], "n_max": 3}}
    builder.store.runs[builder.run_id] |= {"lane": "x", "lane_kind": kind, "options": options}
    row = run_row(builder.run)
    assert (row.policy, row.n_max) == (("planes", 3) if kind == "policy" else ("", None))


def test_two_runs_are_compared_by_their_final_figures(qtbot: QtBot) -> None:
    first = TraceBuilder()
    first.prompt(["a"])
    first.plain(" b")
    first.store.runs[0]["stops"] = ["limit"]
    second = TraceBuilder(first.store)
    second.prompt(["a"])
    second.plain(" b")
    second.store.runs[1] = EndsWhenAsked(second)
    pair = RunPair()
    qtbot.addWidget(pair)
    pair.show()
    pair.set_overlay(RunOverlay(second.run, first.run))
    for _ in range(2):
        pair.refresh()
    tokens = [row for row in pair.model.rows if row.label == "tokens"]
    assert tokens[0].values == (1, 2)


def test_prompts_differ_only_where_both_runs_have_them() -> None:
    one, two = TraceBuilder(), TraceBuilder()
    one.prompt(["as", "k"])
    two.prompt(["a", "sk"])
    two.prompt(["other"], seq_id=1)
    for builder in (one, two):
        builder.plain(" yes")
    assert run_comparison.text_difference(one.run, two.run).startswith("Same text")
    one.prompt(["another"], seq_id=1)
    said = run_comparison.text_difference(one.run, two.run)
    assert said == "The prompts of sequence 1 differ, and therefore the texts."


def test_no_name_of_a_figure_is_cut(qtbot: QtBot) -> None:
    store, plain, drafted = timed_trace(8)
    pair = RunPair()
    qtbot.addWidget(pair)
    pair.resize(220, 200)
    pair.set_overlay(RunOverlay(RunRef(store, plain), RunRef(store, drafted)))
    assert pair.table.columnWidth(0) >= pair.table.sizeHintForColumn(0)
    header = pair.table.horizontalHeader()
    assert header.length() <= pair.table.viewport().width()


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [(4.68, 1290, "0.00363×"), (1290, 4.68, "275.64×"), (3, 4, "0.75×"), (0, 4, "0.00×")],
)
def test_a_small_multiple_is_not_rounded_to_nothing(first: float, second: float, told: str) -> None:
    table = RunPairTable()
    table.show_pairs(("run 1", "run 0"), [FigurePair("prompt", (first, second), "ms", "")])
    assert table.index(0, 3).data() == told


def test_what_came_of_two_texts_is_read_whole(qtbot: QtBot) -> None:
    pair = RunPair()
    qtbot.addWidget(pair)
    store, plain, drafted = timed_trace(8)
    pair.set_overlay(RunOverlay(RunRef(store, plain), RunRef(store, drafted)))
    pair.say(
        "Verdict: unknown. " + "The two logits lie 0.017 apart, and rounding is not known. " * 3
    )
    pair.resize(320, 400)
    pair.show()
    qtbot.waitExposed(pair)
    label = pair.text
    qtbot.waitUntil(lambda: label.height() >= label.heightForWidth(label.width()) > 0)
    assert label.height() > 3 * label.fontMetrics().height()


def test_the_settings_in_which_two_runs_differ_are_named(qtbot: QtBot) -> None:
    store = TraceStore()
    options = {"rollback": "replay", "spec": {"types": ["draft-mtp"], "n_max": 8}}
    one, two = (
        RunRef(store, store.begin_run({"options": options | {"rollback": rollback}}))
        for rollback in ("planes", "replay")
    )
    said = "Settings: run 1 rollback replay; run 0 rollback planes."
    assert run_comparison.setting_difference(two, one) == said
    assert run_comparison.setting_difference(two, two) == ""
    unknown = RunRef(store, store.begin_run({}))
    assert run_comparison.setting_difference(one, unknown) == ""
    pair = RunPair()
    qtbot.addWidget(pair)
    pair.set_overlay(RunOverlay(one, two))
    pair.say("Verdict: same.")
    assert pair.text.text() == f"Verdict: same.\n{said}"
