"""Sums over the steps of a run, taken in a few rows at a time; and the run to compare with."""

from __future__ import annotations

import numpy as np

from engine.analysis.run_cost import find_baseline
from engine.trace.records import PHASES
from engine.trace.timings import StepSums, acceptance, per_position
from tests.support.timed_trace import begin, timed_trace


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


def test_the_baseline_is_a_plain_run_of_the_same_prompt() -> None:
    store, plain, drafted = timed_trace(30)
    assert find_baseline(store, drafted) == plain
    other = begin(store, ("draft-mtp",), prompt=(5, 6, 8))
    assert find_baseline(store, other) is None
    store.runs[plain]["lane"] = "reference"
    assert find_baseline(store, drafted) is None
