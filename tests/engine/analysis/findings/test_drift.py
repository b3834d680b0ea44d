"""Drift that rollbacks make: named where it grows with them, and nowhere else."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from engine.analysis.findings.check import find, recorded
from engine.compare.comparison import Comparison
from engine.session import Session
from engine.trace.facts import Finding
from engine.trace.store import TraceStore
from resources import DEMO_TARGET
from tests.support.comparisons import finish, specs
from tests.support.faults import ROUNDING
from tests.support.golden_runs import options_of
from tests.support.round_rows import add_draft, add_round, new_run

RULE = "drift-with-rejections"
LANES = ("planes", "planes,cache_type_s=bf16", "checkpoint,gate_type=f16")
FAULTY = (f"planes,fault={ROUNDING}", f"checkpoint,fault={ROUNDING}")


@cache
def compared() -> Comparison:
    demo = Session.open(DEMO_TARGET, compute="f32")
    options = options_of(40, n_max=3, ignore_eos=True)
    prompt = demo.prompt("def quicksort(arr):")
    return finish(Comparison(demo, prompt, options, specs(*LANES, *FAULTY), draft_accept=(3, 0, 2)))


def test_snapshots_in_a_shorter_type_are_named_and_types_of_states_are_not() -> None:
    trace = compared().trace
    serious = [found for found in recorded(trace) if found.severity != "info"]
    assert {(trace.runs[f.run_id]["lane"], f.rule) for f in serious} == {
        (lane, RULE) for lane in FAULTY
    }
    for found in serious:
        mine = trace.rounds.column("run_id") == found.run_id
        undone = trace.rounds.column("round")[mine & (trace.rounds.column("memory_rollback") > 0)]
        assert found.round == undone[0]
        assert f"in {len(undone)} rounds with a rollback" in found.evidence
        assert "as for rounding to bf16" in found.evidence


def lane_of(errors: list[float], accepted: list[int]) -> list[Finding]:
    """What is said of a lane whose state has these errors after rounds with drafts of 2."""
    store = TraceStore()
    new_run(store, "reference")
    for name, own in (("noise", [1e-7] * len(errors)), ("planes", errors)):
        run = new_run(store, name, lane_against=0)
        add_round(store, 0, run_id=run)
        for number, (error, n) in enumerate(zip(own, accepted, strict=True), 1):
            add_draft(store, number, 2, n if name == "planes" else 2, run_id=run)
            store.divergence.append(
                run_id=run,
                lane=name,
                round=number,
                seq_id=0,
                pos=number,
                token_id=0,
                max_abs=0.0,
                nmse=1e-12,
                kl=0.0,
                top1_equal=1,
                rank=1,
                top2_gap=1.0,
                state_error=error,
                conv_error=np.nan,
                cells_differ=0,
            )
            store.states.append(
                run_id=run,
                round=number,
                seq_id=0,
                pos=number,
                layer=0,
                state_error=error,
                conv_error=np.nan,
            )
    return [found for found in find(store) if found.rule in (RULE, "state-wrong")]


@pytest.mark.parametrize(
    ("errors", "accepted", "rule"),
    [
        ([1e-7, 2e-3, 2e-3, 5e-3, 9e-3], [2, 0, 2, 1, 0], RULE),
        ([1e-7, 2e-3, 9e-1, 9e-1], [2, 0, 1, 0], RULE),
        # at once as much as another token's state
        ([1e-7, 0.5, 0.5, 0.5, 0.6], [2, 0, 2, 1, 0], "state-wrong"),
        # before anything is undone, and without it
        ([2e-3, 3e-3, 5e-3], [2, 0, 0], "state-wrong"),
        ([1e-7, 2e-3, 9e-3, 9e-3], [2, 0, 2, 2], "state-wrong"),
        ([1e-7, 1e-6, 1e-6], [2, 0, 0], ""),
    ],
)
def test_where_the_error_grows(errors: list[float], accepted: list[int], rule: str) -> None:
    found = lane_of(errors, accepted)
    assert [f.rule for f in found] == ([rule] if rule else [])
    if rule == RULE:
        assert found[0].round == 2 and f"{errors[-1]:.1e} at the end" in found[0].message
