"""Lanes and runs without faults: no rule accuses them, whatever model, policy and drafter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.options import ROLLBACK_POLICIES, Prompt, SpecOptions
from engine.trace.records import MISSING
from tests.support.golden_runs import decode, options_of, prompt_of, session
from tests.support.round_rows import serious

MTP = "qwen35-c-v2x-mtp-f32"


@pytest.mark.parametrize(
    ("name", "n_seqs"), [(MTP, 4), ("qwen3next-e-v2x-f32", 1), ("qwen35-g-v2x-q4_k_m", 1)]
)
@pytest.mark.thinned(4)
def test_lanes(name: str, n_seqs: int) -> None:
    options = options_of(12, n_max=4, parallel=n_seqs, ignore_eos=True)
    prompts = [Prompt(prompt_of(name).tokens[:14])] * n_seqs
    lanes = [NOISE_LANE, *map(LaneSpec.parse, (*ROLLBACK_POLICIES, "carry,ubatch=4"))]
    comparison = Comparison(session(name), prompts, options, lanes, draft_accept=[1, 0, 4, 2])
    while comparison.step():
        pass
    assert serious(recorded(comparison.trace)) == []


@pytest.mark.parametrize("drafter", ["draft-mtp", "ngram-simple"])
@pytest.mark.parametrize(("policy", "n_seqs"), [("planes", 4), ("replay", 1), ("checkpoint", 1)])
def test_runs(policy: str, n_seqs: int, drafter: str) -> None:
    options = options_of(20, rollback=policy, parallel=n_seqs, ignore_eos=True)
    options = replace(options, spec=SpecOptions((drafter,), n_max=4, p_min=0.8))
    prompts = [Prompt(prompt_of(MTP).tokens[: 20 - 4 * i]) for i in range(n_seqs)]
    trace = decode(session(MTP), prompts, options).trace
    found = [f for f in recorded(trace) if f.rule != "checkpoint-dominates"]  # a matter of time
    assert serious(found) == []
    assert set(trace.ubatches.column("pos_gap").tolist()) == {0}
    looked_at = 0 if drafter == "draft-mtp" else MISSING
    assert set(trace.drafts.column("num_wrong_rows").tolist()) <= {looked_at}


def test_a_pool_with_several_rows_of_a_sequence_in_a_pass() -> None:
    name = "qwen3-f-f32"
    options = options_of(12, "ngram-simple", parallel=2, kv="unified", ignore_eos=True)
    prompts = [Prompt(prompt_of(name).tokens[:n]) for n in (20, 13)]
    trace = decode(session(name), prompts, options).trace
    assert trace.ubatches.texts("seq_ids")[0].startswith("0 0 0")
    assert set(trace.ubatches.column("pos_gap").tolist()) == {0}
    assert serious(recorded(trace)) == []
