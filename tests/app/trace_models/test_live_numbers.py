"""The figures of the status line and of the list of runs: a lane has no speed of its own."""

from __future__ import annotations

from app.trace_models.run_comparison import compare_runs
from app.trace_models.run_facts import LiveNumbers, run_row
from engine.trace.run_ref import RunRef
from tests.support.timed_trace import timed_trace


def test_a_lane_has_no_speed_for_its_drafts_were_made_for_all() -> None:
    store, _, run_id = timed_trace(12)
    run = RunRef(store, run_id)
    before = LiveNumbers.read(store, run_id)
    assert before.tokens_per_second
    assert run_row(run, "m").tokens_per_second == before.tokens_per_second
    assert "tokens/s" in [pair.label for pair in compare_runs(run, run)]
    run.facts["lane"] = "planes"
    after = LiveNumbers.read(store, run_id)
    assert after.tokens_per_second is None
    assert (after.tokens, after.acceptance) == (before.tokens, before.acceptance)
    assert run_row(run, "m").tokens_per_second is None
    assert "tokens/s" not in [pair.label for pair in compare_runs(run, run)]
