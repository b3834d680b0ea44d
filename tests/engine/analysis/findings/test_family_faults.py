"""The faults on every further family: each is named by its own rule, and nothing without them."""

from __future__ import annotations

import numpy as np
import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from tests.support.faults import LARGE_FAULTS
from tests.support.golden_files import second_set
from tests.support.golden_runs import options_of, prompt_of, session
from tests.support.round_rows import serious

MODELS = second_set()
CLEAN = ("checkpoint", "carry", "planes,ubatch=3")
"""A lane of these, and two faults, for each family by turns."""
FAULTY = {
    "checkpoint,fault=keep-stale-kv": "duplicate-kv-cells",
    "ring,fault=stale-logits": "stale-logits",
    "planes,ubatch=3,fault=stale-plane": "stale-plane",
    "replay,fault=no-conv-rollback": "conv-not-rolled-back",
    "planes,fault=plane-off-by-one": "plane-off-by-one",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(6)
def test_every_fault_is_named_and_nothing_else(name: str) -> None:
    assert {lane.split("fault=")[1] for lane in FAULTY} == LARGE_FAULTS
    turn, rules = MODELS.index(name), list(FAULTY.items())
    faulty = {*(rules[(2 * turn + i) % len(rules)] for i in range(2))}
    texts = [CLEAN[turn % len(CLEAN)], *(lane for lane, _ in faulty)]
    lanes = [NOISE_LANE, *map(LaneSpec.parse, texts)]
    comparison = Comparison(
        session(name),
        [prompt_of(name)],
        options_of(16, n_max=5, ignore_eos=True),
        lanes,
        draft_accept=[1, 0, 3],
    )
    while comparison.step():
        pass
    trace = comparison.trace
    lane_of = {run_id: facts["lane"] for run_id, facts in trace.runs.items()}
    found = {(lane_of[run_id], rule) for rule, run_id, _ in serious(recorded(trace))}
    assert found == faulty


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("lfm2")])
def test_errors_of_states_that_layers_do_not_have(name: str) -> None:
    comparison = Comparison(
        session(name),
        [prompt_of(name)],
        options_of(6, n_max=3, ignore_eos=True),
        [NOISE_LANE, LaneSpec.parse("ring")],
        draft_accept=[1],
    )
    while comparison.step():
        pass
    states, rows = comparison.trace.states, comparison.trace.divergence
    assert len(states.column("state_error"))
    for table in (states, rows):
        assert np.isnan(table.column("state_error")).all()
        assert (table.column("conv_error") < 1e-5).any()
