"""Comparisons with faults: each is named by its own rule, at the rollback that it spoils."""

from __future__ import annotations

from functools import cache

import pytest

from engine.analysis.findings.check import RULES, find, recorded
from engine.analysis.findings.run_rows import SEVERITIES
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.options import ROLLBACK_POLICIES, Prompt
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from resources import DEMO_TARGET
from tests.support.faults import FAULTY_LANES, assert_named
from tests.support.golden_runs import MTP_MODELS, SAMPLED, options_of, prompt_of, session

CLEAN = (*ROLLBACK_POLICIES, "planes,ubatch=3", "ring,split=seq,kv=unified", "planes,n_rs_seq=1")
# greedy runs of the golden models are in tests/engine/compare/test_comparison.py
CASES = [(MTP_MODELS[0], "f32", True), ("demo", "int8", True)]


@cache
def opened(name: str, compute: str) -> tuple[Session, Prompt]:
    if name == "demo":
        demo = Session.open(DEMO_TARGET, compute=compute)
        return demo, demo.prompt("class Node:\n    def __init__(self")
    return session(name), prompt_of(name)


@cache
def compared(name: str, compute: str, sampled: bool) -> Comparison:
    loaded, prompt = opened(name, compute)
    sampler = {"sampler": SAMPLED} if sampled else {}
    n = 14 if name == "demo" else 30
    options = options_of(n, "draft-mtp", n_max=5, ignore_eos=True, **sampler)
    lanes = [NOISE_LANE, *map(LaneSpec.parse, (*CLEAN, *FAULTY_LANES))]
    comparison = Comparison(loaded, prompt, options, lanes)
    while comparison.step():
        pass
    return comparison


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.thinned(4)
def test_every_fault_is_named_and_nothing_else(case) -> None:
    assert_named(compared(*case).trace)


def test_evidence_counts_the_rounds() -> None:
    trace = compared(*CASES[0]).trace
    lanes = {facts["lane"]: run_id for run_id, facts in trace.runs.items()}
    run_id = lanes["planes,fault=plane-off-by-one"]
    (finding,) = (f for f in recorded(trace) if f.run_id == run_id and f.severity == "error")
    mine = (trace.rounds.column("run_id") == run_id) & (trace.rounds.column("rollback_depth") > 0)
    rounds = trace.rounds.column("round")[mine]
    assert f"{len(rounds)} rounds, the first {rounds[0]}, the last {rounds[-1]}" in finding.evidence
    assert finding.seq_id == 0
    assert finding.suggestion == RULES["plane-off-by-one"].suggestion


def test_an_exported_trace_holds_the_findings_and_gives_them_again(tmp_path) -> None:
    trace = compared(*CASES[0]).trace
    export_csv(trace, tmp_path / "out")
    again = open_trace(tmp_path / "out")
    assert recorded(again) == recorded(trace)
    assert find(again) == find(trace) == recorded(trace)


def test_errors_come_first() -> None:
    severities = [f.severity for f in recorded(compared(*CASES[0]).trace)]
    assert severities == sorted(severities, key=SEVERITIES.index)
    assert "info" in severities
