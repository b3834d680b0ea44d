"""Figures against numbers worked out by hand."""

from __future__ import annotations

import pytest

from engine.trace.store import TraceStore
from engine.trace.timings import acceptance, summary, timings


def add(store: TraceStore, round_: int, t_ms: float, seq_id: int = 0, **values: object) -> None:
    store.rounds.append(
        run_id=values.pop("run_id", 0), round=round_, seq_id=seq_id, t_ms=t_ms, **values
    )


def step(
    store: TraceStore, round_: int, t_ms: float, drafted: int, accepted: int, **more: object
) -> None:
    add(
        store,
        round_,
        t_ms,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_emitted=accepted + 1,
        rollback_depth=drafted - accepted,
        **more,
    )


def test_timings_of_the_small_trace(small_trace: TraceStore) -> None:
    assert timings(small_trace, 0, 0) == {
        "cache_n": 0,
        "prompt_n": 3,
        "prompt_ms": 18.0,
        "prompt_per_token_ms": 6.0,
        "prompt_per_second": pytest.approx(3 / 0.018),
        "predicted_n": 6,  # 1 free + 3 + 2
        "predicted_ms": 21.0,  # 41 - 20
        "predicted_per_token_ms": 4.2,  # over the five tokens after the free one
        "predicted_per_second": pytest.approx(5 / 0.021),
        "predicted_per_token_ms_n_gen": 3.5,  # over all six
        "predicted_per_second_n_gen": pytest.approx(6 / 0.021),
        "draft_n": 5,
        "draft_n_accepted": 3,
        "draft_n_accepted_with_replayed": 3,
    }
    assert timings(small_trace, 0) == timings(small_trace, 0, 0)


def test_summary_of_the_small_trace(small_trace: TraceStore) -> None:
    figures = summary(small_trace, 0)
    assert timings(small_trace, 0).items() <= figures.items()
    assert figures["num_spec_steps"] == 2
    assert figures["mean_acceptance_length"] == 1 + 3 / 2
    assert figures["draft_acceptance_rate"] == 3 / 5
    assert figures["acceptance_histogram"] == [0, 1, 1, 0]
    assert figures["acceptance_per_position"] == {
        # index 0: accepted in both steps; index 1: in the first; index 2: offered once, not reached
        "unconditional": [1.0, 0.5, 0.0],
        "unconditional_given_drafted": [1.0, 0.5, 0.0],
        "conditional": [1.0, 0.5, None],
    }
    assert figures["rollback_depth_histogram"] == [1, 0, 1]
    assert figures["phase_ms"] == {
        "draft": 5.0,
        "verify": 14.5,
        "sample": 0.75,
        "save": None,
        "rollback": None,
        "restore": None,
        "replay": None,
    }


def test_the_three_rates_differ_where_drafts_differ_in_length() -> None:
    store = TraceStore()
    add(store, 0, 1.0, num_emitted=1, verify_width=2, verify_ms=1.0)
    step(store, 1, 2.0, drafted=4, accepted=0)
    step(store, 2, 3.0, drafted=1, accepted=1)
    step(store, 3, 4.0, drafted=2, accepted=2)
    step(store, 4, 5.0, drafted=1, accepted=0)
    add(store, 5, 6.0, num_draft_tokens=0, num_accepted_draft_tokens=0, num_emitted=1)
    figures = acceptance(store, 0)
    assert figures["num_spec_steps"] == 4  # the round without a draft is not a step
    assert figures["acceptance_histogram"] == [2, 1, 1, 0, 0]
    assert figures["acceptance_per_position"] == {
        "unconditional": [0.5, 0.25, 0.0, 0.0],
        "unconditional_given_drafted": [0.5, 0.5, 0.0, 0.0],
        "conditional": [0.5, 1.0, None, None],  # one of 2 right drafts went on, to index 1
    }


def test_tokens_that_a_stop_dropped_still_count_as_accepted() -> None:
    store = TraceStore()
    add(store, 0, 1.0, num_emitted=1, verify_width=2, verify_ms=1.0)
    add(
        store,
        1,
        3.0,
        num_draft_tokens=3,
        num_accepted_draft_tokens=3,
        num_emitted=2,
        stop_kind="end",
    )
    figures = timings(store, 0)
    assert figures["predicted_n"] == 3
    assert figures["draft_n_accepted"] == 3


def test_a_replay_adds_no_drafted_tokens() -> None:
    store = TraceStore()
    add(store, 0, 1.0, num_emitted=1, verify_width=2, verify_ms=1.0)
    step(store, 1, 9.0, drafted=3, accepted=1, rollback_path="restore", replay_ms=2.0)
    figures = summary(store, 0)
    assert (figures["draft_n"], figures["draft_n_accepted"]) == (3, 1)
    assert figures["phase_ms"]["replay"] == 2.0
    assert figures["rollback_depth_histogram"] == [0, 0, 1]


def test_without_drafts_the_draft_figures_are_absent_not_zero() -> None:
    store = TraceStore()
    add(store, 0, 10.0, num_emitted=1, verify_width=4, verify_ms=10.0)
    for i in range(1, 5):
        add(store, i, 10.0 + 5 * i, num_draft_tokens=0, num_accepted_draft_tokens=0, num_emitted=1)
    figures = summary(store, 0)
    assert "draft_n" not in figures
    assert "draft_n_accepted" not in figures
    assert figures["predicted_per_second"] == pytest.approx(200.0)  # 4 tokens in 20 ms
    assert figures["mean_acceptance_length"] is None
    assert figures["draft_acceptance_rate"] is None
    assert figures["acceptance_histogram"] == []


def test_the_free_token_alone_has_no_rate() -> None:
    store = TraceStore()
    add(store, 0, 10.0, num_emitted=1, verify_width=4, verify_ms=10.0)
    figures = timings(store, 0)
    assert figures["predicted_n"] == 1
    assert figures["predicted_per_second"] == 0.0
    assert figures["predicted_per_token_ms"] == 0.0
    assert figures["predicted_ms"] == pytest.approx(1e-3)  # never zero


def test_an_empty_trace_gives_zeros() -> None:
    figures = summary(TraceStore(), 0)
    assert figures["prompt_n"] == figures["predicted_n"] == figures["num_spec_steps"] == 0
    assert figures["prompt_per_second"] == figures["predicted_per_second"] == 0.0
    assert figures["phase_ms"]["verify"] is None


def test_tokens_before_the_prompt_batch_are_cached() -> None:
    store = TraceStore()
    add(store, 0, 4.0, pos0=12, num_emitted=1, verify_width=5, verify_ms=4.0)
    assert timings(store, 0)["cache_n"] == 12
    assert timings(store, 0)["prompt_n"] == 5


def test_a_prompt_in_parts_is_timed_as_one() -> None:
    store = TraceStore()
    for i in range(3):
        add(
            store,
            i,
            10.0 * i + 10,
            pos0=8 * i,
            num_emitted=int(i == 2),
            verify_width=8,
            verify_ms=4.0,
        )
    step(store, 3, 40.0, drafted=3, accepted=1)
    figures = summary(store, 0)
    assert (figures["cache_n"], figures["prompt_n"], figures["prompt_ms"]) == (0, 24, 12.0)
    assert (figures["predicted_n"], figures["predicted_ms"]) == (3, 10.0)
    assert figures["predicted_per_token_ms"] == 5.0
    assert figures["num_spec_steps"] == 1


def test_a_prompt_that_was_cut_off_has_no_free_token() -> None:
    store = TraceStore()
    add(store, 0, 10.0, num_emitted=0, verify_width=8, verify_ms=4.0)
    add(store, 1, 20.0, num_emitted=0, verify_width=8, verify_ms=4.0)
    add(store, 1, 20.0, 1, num_emitted=1, verify_width=8, verify_ms=4.0)
    add(store, 2, 30.0, 1, num_draft_tokens=0, num_accepted_draft_tokens=0, num_emitted=1)
    assert timings(store, 0, 0)["prompt_n"] == 16
    assert timings(store, 0, 0)["predicted_n"] == 0
    assert timings(store, 0)["predicted_per_second"] == pytest.approx(100.0)


def test_shared_time_of_two_sequences_counts_once() -> None:
    store = TraceStore()
    for seq in (1, 0):  # the order of rows is not the order of sequences
        add(store, 0, 10.0, seq, num_emitted=1, verify_width=3, verify_ms=5.0)
    add(store, 1, 14.0, 0, num_emitted=1)
    add(store, 1, 14.0, 1, num_emitted=1)
    add(store, 2, 20.0, 1, num_emitted=1)
    both = timings(store, 0)
    assert both["prompt_ms"] == 10.0
    assert both["predicted_ms"] == 10.0  # 10 to 20, not 4 + 10
    assert both["predicted_n"] == 5
    assert both["predicted_per_second"] == pytest.approx(300.0)  # two tokens were free
    assert timings(store, 0, 0)["predicted_ms"] == 4.0
    assert timings(store, 0, 1)["predicted_ms"] == 10.0


def test_runs_have_clocks_of_their_own() -> None:
    store = TraceStore()
    for run in (0, 1):
        add(store, 0, 10.0, run_id=run, num_emitted=1, verify_width=3, verify_ms=10.0)
        add(store, 1, 14.0, run_id=run, num_emitted=2)
    assert timings(store, 1)["predicted_ms"] == 4.0
    assert timings(store, 1)["predicted_per_second"] == pytest.approx(500.0)
