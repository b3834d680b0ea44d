"""Faults by how they show."""

from __future__ import annotations

import numpy as np

from engine.analysis.findings.check import recorded
from engine.options import MEMORY_FAULTS
from engine.trace.store import TraceStore
from tests.support.round_rows import serious

ROUNDING = "bf16-snapshots"
"""Off by a rounding at first, and by more with every rollback (test_drift)."""

LARGE_FAULTS = set(MEMORY_FAULTS) - {ROUNDING}
"""Those that are off by the content of a token at once."""

FAULTY_LANES = {
    "checkpoint,fault=keep-stale-kv": "duplicate-kv-cells",
    "planes,n_rs_seq=1,fault=keep-stale-kv": "duplicate-kv-cells",
    "checkpoint,fault=stale-logits": "stale-logits",
    "ring,fault=stale-logits": "stale-logits",
    "planes,ubatch=3,fault=stale-plane": "stale-plane",
    "planes,fault=no-conv-rollback": "conv-not-rolled-back",
    "carry,fault=no-conv-rollback": "conv-not-rolled-back",
    "ring,fault=no-conv-rollback": "conv-not-rolled-back",
    "replay,fault=no-conv-rollback": "conv-not-rolled-back",
    "planes,fault=plane-off-by-one": "plane-off-by-one",
    "carry,fault=plane-off-by-one": "plane-off-by-one",
}
"""Lanes with all large faults, and the rule that names each."""


def lane_without(lane: str) -> str:
    """The lane that differs by having no fault."""
    return lane.split(",fault=")[0]


def first_spoilt(trace: TraceStore, lane: str) -> int:
    """The round whose rollback a fault of FAULTY_LANES is the first to spoil, seen in the lane
    without it."""
    runs = {facts["lane"]: run_id for run_id, facts in trace.runs.items()}
    rounds = trace.rounds
    spoilt = rounds.column("run_id") == runs[lane_without(lane)]
    spoilt &= rounds.column("rollback_depth") > 0
    if "n_rs_seq=1" in lane or "stale-plane" in lane:
        # spoils what the lane without it restores from its checkpoint
        spoilt &= np.array(rounds.texts("rollback_path")) == "restore_depth"
    return int(rounds.column("round")[spoilt][0])


def assert_named(trace: TraceStore) -> None:
    """Each of FAULTY_LANES is named by its rule where it first spoils a rollback, nothing else."""
    runs = {facts["lane"]: run_id for run_id, facts in trace.runs.items()}
    expected = {
        (rule, runs[lane], first_spoilt(trace, lane)) for lane, rule in FAULTY_LANES.items()
    }
    found = serious(recorded(trace))
    assert set(found) == expected
    assert len(found) == len(expected)
