"""Break rules: their text, and the rows at which they hold."""

from __future__ import annotations

import pytest

from engine.analysis.breaks import EXAMPLES, KINDS, BreakRule, BreakWatch
from engine.errors import OptionError
from engine.trace.store import TraceStore
from tests.support.lane_traces import LaneBuilder
from tests.support.trace_builder import PLANES, TraceBuilder


def rules(*texts: str) -> list[BreakRule]:
    return [BreakRule.parse(text) for text in texts]


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_text_of_a_rule_reads_as_the_same_rule(text: str) -> None:
    rule = BreakRule.parse(text)
    assert BreakRule.parse(str(rule)) == rule
    assert BreakRule.parse(f"  {text.upper()} ") == rule
    assert rule.kind == KINDS[EXAMPLES.index(text)]


def test_what_a_rule_says() -> None:
    assert BreakRule.parse("depth>=3") == BreakRule("depth", 3)
    assert BreakRule.parse("path == refused") == BreakRule("path", name="refused")
    assert BreakRule.parse("divergence > 1e-4") == BreakRule("divergence", 1e-4)
    assert BreakRule.parse("acceptance(5) < .25") == BreakRule("acceptance", 0.25, steps=5)
    assert BreakRule.parse("finding = stale-plane") == BreakRule("finding", name="stale-plane")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "Start it with"),
        ("speed > 3", "Start it with"),
        ("depth > 3", "depth >= 4"),
        ("depth >= -1", "depth >= 4"),
        ("depth >= 0", "from 1"),
        ("path = home", "refused"),
        ("divergence > ...", "1e-4"),
        ("divergence > .", "1e-4"),
        ("acceptance < 0.5", "acceptance(20)"),
        ("acceptance(0) < 0.5", "1 to"),
        ("acceptance(99999) < 0.5", "1 to"),
        ("acceptance(5) < 1.5", "share"),
        ("acceptance(5) < 0", "share"),
        ("finding !", "finding"),
    ],
)
def test_a_wrong_rule_says_how_it_is_written(text: str, word: str) -> None:
    with pytest.raises(OptionError, match="Break rule") as caught:
        BreakRule.parse(text)
    assert word in caught.value.remedy


def test_depth_is_looked_at_once_and_only_in_new_rows() -> None:
    builder = TraceBuilder()
    builder.prompt(["a"])
    builder.draft([], " x", [" 1", " 2", " 3"])
    watch = BreakWatch(builder.store)
    assert watch.check(rules("depth >= 1")) is None, "that was before it began to look"
    builder.draft([" b"], " x", [" 1"])
    builder.draft([], " x", [" 1", " 2"])
    hit = watch.check(rules("depth >= 2"))
    assert hit is not None
    assert (hit.run.run_id, hit.round, hit.seq_id) == (builder.run_id, 3, 0)
    assert hit.number == f"depth 2 ≤ n_rs_seq {PLANES}"
    assert str(hit) == f"depth >= 2: round 3, sequence 0, depth 2 ≤ n_rs_seq {PLANES}"
    assert watch.check(rules("depth >= 1")) is None, "every row once"


def test_a_round_without_a_rollback_is_no_depth() -> None:
    store = TraceStore()
    watch = BreakWatch(store)
    store.rounds.append(run_id=0, round=0, seq_id=0)
    assert watch.check(rules("depth >= 1", "path = none", "acceptance(1) < 1")) is None


@pytest.mark.parametrize(
    ("rule", "taken", "holds"),
    [
        ("restore", "restore", True),
        ("restore", "restore_depth", True),
        ("restore", "seq_rm", False),
        ("restore_depth", "restore", False),
        ("refused", "refused", True),
    ],
)
def test_path(rule: str, taken: str, holds: bool) -> None:
    builder = TraceBuilder()
    watch = BreakWatch(builder.store)
    builder.draft([], " x", [" 1"], path=taken)
    hit = watch.check(rules(f"path = {rule}"))
    assert (hit is not None) is holds
    assert hit is None or taken in hit.number


def test_divergence_of_a_lane_but_not_of_the_noise() -> None:
    builder = LaneBuilder()
    noise, lane = builder.lane("noise", ()), builder.lane("planes", ())
    of_peer = builder.lane("noise,peer=1", ())
    watch = BreakWatch(builder.store)
    builder.row(noise, "noise", 0, 0.5)
    builder.row(of_peer, "noise,peer=1", 0, 0.5)
    builder.row(lane, "planes", 0, 1e-5)
    assert watch.check(rules("divergence > 1e-4")) is None
    builder.row(lane, "planes", 1, 2e-4)
    hit = watch.check(rules("divergence > 1e-4"))
    assert hit is not None
    assert (hit.run.run_id, hit.round) == (lane, 1)
    assert "0.0002" in hit.number and "planes" in hit.number
    builder.row(lane, "planes", 2, float("nan"))
    hit = watch.check(rules("divergence > 1e-4"))
    assert hit is not None and "not finite" in hit.number


def test_acceptance_falls_once_until_it_has_recovered() -> None:
    builder = TraceBuilder()
    watch = BreakWatch(builder.store)
    (rule,) = rules("acceptance(2) < 0.5")
    held = []
    # accepted of two each; the rate of the last two steps is 1, 0.5, 0.25, 0.25, 0.5, 0.5, 0
    for accepted in (2, 2, 0, 1, 0, 2, 0, 0):
        builder.draft([" y"] * accepted, " x", [" n"] * (2 - accepted))
        hit = watch.check([rule])
        held.append("" if hit is None else hit.number)
    assert [i for i, number in enumerate(held) if number] == [3, 7]
    assert held[3] == "acceptance 0.25 of the last 2 steps"


def test_acceptance_is_by_sequence_and_waits_for_enough_steps() -> None:
    builder = TraceBuilder()
    watch = BreakWatch(builder.store)
    (rule,) = rules("acceptance(2) < 0.5")
    builder.draft([], " x", [" n"], seq_id=0)
    builder.draft([], " x", [" n"], seq_id=1)
    assert watch.check([rule]) is None
    builder.plain(" p", seq_id=1)
    assert watch.check([rule]) is None, "a round without a draft is not a step"
    builder.draft([], " x", [" n"], seq_id=1)
    hit = watch.check([rule])
    assert hit is not None and hit.seq_id == 1


def test_a_finding() -> None:
    store = TraceStore()
    watch = BreakWatch(store)
    store.findings.append(run_id=2, rule="replay-livelock", severity="error", evidence="3 restores")
    hit = watch.check(rules("finding = other", "finding = replay-livelock"))
    assert hit is not None
    assert (hit.run.run_id, hit.round, hit.seq_id) == (2, None, None)
    assert hit.rule.name == "replay-livelock"
    assert str(hit).endswith("error replay-livelock (3 restores)")
    store.findings.append(run_id=2, round=4, seq_id=1, rule="other", severity="info", evidence="")
    assert watch.check(rules("finding")) is not None


def test_the_first_rule_of_the_list_is_named() -> None:
    builder = TraceBuilder()
    watch = BreakWatch(builder.store)
    builder.draft([], " x", [" 1", " 2"], path="restore")
    hit = watch.check(rules("path = restore", "depth >= 1"))
    assert hit is not None and hit.rule.kind == "path"
