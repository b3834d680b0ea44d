"""The cost of lanes, against sums by hand: times by phase, shared drafts, spread, sentences."""

from __future__ import annotations

import pytest

from engine.analysis.run_cost import COST_HEADS, RunCost, cost_cells, cost_sentence, time_ratio
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

N = 20
"""Rounds after the prompt."""


def lane(
    store: TraceStore, name: str, ms: list[float], kind: str = "policy", **facts: object
) -> int:
    """A lane whose rounds take so long, one after another; every fourth of a checkpoint restores,
    every fourth of planes removes."""
    against = None if kind == "reference" else 0
    run_id = store.begin_run({"lane": name, "lane_kind": kind, "lane_against": against, **facts})
    for number in range(N + 1):
        undone = number > 0 and number % 4 == 0
        restores = undone and name == "checkpoint"
        path = "restore" if restores else "seq_rm" if undone else "none"
        store.rounds.append(
            run_id=run_id,
            round=number,
            seq_id=0,
            num_draft_tokens=3 if number else None,
            num_emitted=1,
            rollback_path=path,
            verify_ms=900.0 if not number else ms[(number - 1) % len(ms)],
            replay_ms=2.0 if restores else 0.0,
            checkpoint_bytes=1000 if name == "checkpoint" else None,
            state_bytes_restored=1000 if restores else 0,
            memory_bytes_held=5000 + number,
        )
        for purpose in ("verify", "replay")[: 1 + restores]:
            store.ubatches.append(
                run_id=run_id, round=number, n_seqs=1, n_seq_tokens=4, n_padding=1, purpose=purpose
            )
        if kind == "reference" and number:
            store.drafts.append(run_id=run_id, round=number, seq_id=0, draft_ms=0.5)
    return run_id


def costs(store: TraceStore) -> list[RunCost]:
    return [RunCost.of(RunRef(store, run_id)) for run_id in store.runs]


@pytest.fixture
def store() -> TraceStore:
    store = TraceStore()
    lane(store, "reference", [7.0], "reference")
    lane(store, "noise", [8.0], "noise")
    lane(store, "checkpoint", [5.0])
    lane(store, "planes", [4.0, 4.1, 3.9])
    return store


def test_figures_are_sums_without_the_prompt_and_with_the_shared_draft(store: TraceStore) -> None:
    reference, noise, checkpoint, planes = costs(store)
    assert reference.round_ms == noise.round_ms == {}, "no run does what they do"
    assert reference.n_passes == N
    assert checkpoint.per_round() == pytest.approx(0.5 + 5.0 + 2.0 * 5 / N)
    assert checkpoint.per_round("draft") == 0.5
    assert checkpoint.per_round("replay") == 2.0 * 5 / N
    assert (checkpoint.n_restores, checkpoint.n_removed, planes.n_removed) == (5, 0, 5)
    assert (checkpoint.n_passes, checkpoint.n_replayed) == (N + 5, 5 * 3)
    assert checkpoint.bytes_moved == N * 1000 + 5 * 1000
    assert planes.bytes_moved == 0
    assert planes.bytes_held == 5000 + N
    cells = dict(zip(COST_HEADS, cost_cells(checkpoint), strict=True))
    assert (cells["lane"], cells["ms/round"], cells["replay"]) == ("checkpoint", "6", "0.5")
    assert (cells["moved"], cells["rollback"]) == ("24.4 KiB", "-")


def test_a_part_of_the_rounds(store: TraceStore) -> None:
    cost = RunCost.of(RunRef(store, 2), 4, 8)
    assert cost.rounds.tolist() == [4, 5, 6, 7, 8]
    assert (cost.n_restores, cost.n_passes) == (2, 7)


def test_the_sentence_has_a_ratio_with_its_spread(store: TraceStore) -> None:
    found = costs(store)
    ratio = time_ratio(found[2], found[3])
    assert ratio is not None and 1 < ratio.low < ratio.ratio < ratio.high
    words = cost_sentence(found, 2)
    assert "means" not in words, "those on show are of the same rounds"
    assert words == cost_sentence(found, 3), "of the fastest, against the slowest"
    assert words.startswith(f"checkpoint: {ratio.ratio:.2f} times the time of planes here (")
    assert words.endswith("; 5 restores, 24.4 KiB moved, 10 ms of replay.")
    assert cost_sentence(found, 0) == "", "the reference has no cost"


def test_no_verdict_inside_the_spread() -> None:
    store = TraceStore()
    lane(store, "reference", [7.0], "reference")
    lane(store, "planes", [4.0, 6.0, 5.0, 4.5, 3.0, 7.0, 4.0])
    lane(store, "ring", [6.0, 4.0, 5.1, 4.0, 3.5, 5.0, 4.1])
    words = cost_sentence(costs(store), 1)
    assert words.startswith("No significant difference between the times of planes and ring: ")


def test_a_turn_of_another_program_is_no_cost_of_a_lane(store: TraceStore) -> None:
    lane(store, "ring", [4.0] * (N - 1) + [400.0])
    found = {cost.name: cost for cost in costs(store)}
    ratio = time_ratio(found["ring"], found["planes"])
    assert ratio is not None and 0.9 < ratio.low < ratio.high < 1.1
    assert ratio.spread.endswith(f" parts of {N - 1} rounds, 1 unusually slow one left out")


def test_a_lane_that_does_the_work_of_several_has_no_time(store: TraceStore) -> None:
    lane(store, "carry,forks", [30.0], lane_copies=[])
    found = costs(store)
    assert found[-1].round_ms == {} and found[-1].per_round() is None
    assert cost_sentence(found, 2).startswith("checkpoint")


@pytest.mark.parametrize("against", [7, 2, "x", None])
def test_a_trace_of_anyone_may_name_any_leader(store: TraceStore, against: object) -> None:
    store.runs[2]["lane_against"] = against
    assert RunCost.of(RunRef(store, 2)).n_restores == 5


def test_an_empty_run_has_no_cost() -> None:
    store = TraceStore()
    store.begin_run({"lane": "planes", "lane_kind": "policy"})
    (cost,) = costs(store)
    assert cost.per_round() is None and cost.bytes_moved is None
    assert set(cost_cells(cost)[1:]) == {"-"}


def test_a_lane_that_is_slower_by_rounds_out_of_proportion_is_the_faster_one() -> None:
    store = TraceStore()
    lane(store, "reference", [7.0], "reference")
    lane(store, "checkpoint", [5.0])
    run_id = lane(store, "planes", [*[4.0] * (N - 1), 900.0])
    words = cost_sentence(costs(store), run_id)
    assert words.startswith("checkpoint: 1.") and " -" not in words
    means = " and ".join(cost_cells(cost)[1] for cost in costs(store)[1:])
    assert f"; means of all rounds: {means} ms; " in words, "why it is not the ratio of these"
