"""What-if estimates against a count by hand, and against the run that they are made from."""

from __future__ import annotations

import numpy as np
import pytest

from engine.trace.baseline import find_baseline
from engine.trace.records import MISSING, PHASES
from engine.trace.step_sums import StepSums, joint_counts, per_position
from engine.trace.timings import acceptance
from engine.trace.what_if import expected_lengths, verify_cost, what_if
from tests.support.timed_trace import begin, timed_trace


def sums_of(rows: list[tuple[int, int, float]], draft_ms: float = 2.0) -> StepSums:
    """One sequence: a prompt, then (drafted, accepted, verify_ms), each drafted + 1 wide."""
    drafted = np.array([MISSING, *(d for d, _, _ in rows)])
    accepted = np.array([MISSING, *(a for _, a, _ in rows)])
    n = len(drafted)
    phases = {phase: np.zeros(n) for phase in PHASES}
    phases["verify"] = np.array([50.0, *(ms for _, _, ms in rows)])
    phases["draft"] = np.array([9.0, *(draft_ms * d for d, _, _ in rows)])
    sums = StepSums()
    sums.add(np.zeros(n, int), drafted, accepted, np.maximum(drafted, 0) + 1, phases)
    return sums


def test_lengths_are_those_of_drafts_cut_short() -> None:
    rng = np.random.default_rng(3)
    drafted = rng.integers(1, 7, 400)
    accepted = rng.integers(0, drafted + 1)
    found = expected_lengths(joint_counts(drafted, accepted))
    cut = [1 + float(np.minimum(accepted, k).mean()) for k in range(int(drafted.max()) + 1)]
    assert found == pytest.approx(cut)


def test_estimates_by_hand() -> None:
    result = what_if(sums_of([(2, 2, 30.0), (2, 0, 30.0), (1, 1, 20.0), (0, 0, 10.0)]))
    assert result is not None
    none, one, two = result.estimates
    assert (none.expected_length, one.expected_length, two.expected_length) == pytest.approx(
        (1.0, 5 / 3, 2.0)
    )
    assert (none.verify_ms, one.verify_ms, two.verify_ms) == pytest.approx((10.0, 20.0, 80 / 3))
    assert (none.draft_ms, one.draft_ms, two.draft_ms) == pytest.approx((0.0, 2.0, 10 / 3))
    # three steps of 22 ms and the round without a draft: 3 * 5/3 + 1 tokens
    assert one.tokens_per_second == pytest.approx(1e3 * 6 / (3 * 22 + 10))
    assert none.tokens_per_second == pytest.approx(100.0)
    assert result.best is none
    assert result.unmeasured_widths == ()


def test_undone_drafts_are_paid_for_where_they_would_be_undone() -> None:
    sums = sums_of([(2, 1, 30.0), (2, 2, 30.0)])
    sums.step_ms["restore"] = 8.0
    result = what_if(sums)
    assert result is not None
    assert [e.rest_ms for e in result.estimates] == pytest.approx([0.0, 0.0, 4.0])


def test_widths_that_were_not_measured_lie_between_their_neighbours() -> None:
    sums = sums_of([(3, 3, 40.0), (1, 1, 20.0)])
    assert verify_cost(sums, np.array([1, 2, 3, 4, 9])).tolist() == [20.0, 20.0, 30.0, 40.0, 40.0]
    result = what_if(sums)
    assert result is not None
    assert result.unmeasured_widths == (1, 3)


def test_the_recorded_length_gives_the_recorded_speed() -> None:
    store, _, run_id = timed_trace(200)
    table = store.rounds
    mine = (table.column("run_id") == run_id) & (table.column("num_draft_tokens") != MISSING)
    phases = {phase: table.column(f"{phase}_ms")[mine] for phase in PHASES}
    emitted = int(table.column("num_emitted")[mine].sum())
    result = what_if(sums_over(run_id, store))
    assert result is not None
    total = sum(float(values.sum()) for values in phases.values())
    assert result.recorded.tokens_per_second == pytest.approx(1e3 * emitted / total)


def sums_over(run_id: int, store: object, step: int = 7) -> StepSums:
    """The sums of a run, taken in a few rows at a time."""
    table = store.rounds  # type: ignore[attr-defined]
    rows = np.flatnonzero(table.column("run_id") == run_id)
    names = ("seq_id", "num_draft_tokens", "num_accepted_draft_tokens", "verify_width")
    sums = StepSums()
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        phases = {phase: table.column(f"{phase}_ms")[part] for phase in PHASES}
        sums.add(*(table.column(name)[part] for name in names), phases)
    return sums


def test_sums_taken_in_parts_count_like_acceptance() -> None:
    store, _, run_id = timed_trace(120, n_seqs=2)
    counted = acceptance(store, run_id)
    sums = sums_over(run_id, store)
    assert sums.n_steps == counted["num_spec_steps"]
    for name, values in per_position(sums.counts).items():
        assert counted[name] == values
    assert sums.counts.sum(0).tolist() == counted["acceptance_histogram"]


def test_an_untimed_run_has_lengths_only() -> None:
    sums = sums_of([(2, 1, float("nan"))])
    result = what_if(sums)
    assert result is not None
    assert result.best is None
    assert [e.expected_length for e in result.estimates] == [1.0, 2.0, 2.0]
    assert result.recorded.step_ms is None


def test_without_a_step_there_is_no_estimate() -> None:
    assert what_if(sums_of([(0, 0, 10.0)])) is None


def test_the_baseline_is_a_plain_run_of_the_same_prompt() -> None:
    store, plain, drafted = timed_trace(30)
    assert find_baseline(store, drafted) == plain
    other = begin(store, ("draft-mtp",), prompt=(5, 6, 8))
    assert find_baseline(store, other) is None
    store.runs[plain]["lane"] = "reference"
    assert find_baseline(store, drafted) is None
