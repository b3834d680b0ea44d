"""Applying the rules: on demand, once into the table, over long runs."""

from __future__ import annotations

import numpy as np

from engine.analysis.findings.check import find, record_findings, recorded
from engine.trace.store import TraceStore
from tests.support.round_rows import add_draft, add_round, new_run


def test_on_demand_writes_nothing_and_sees_what_is_new() -> None:
    store = TraceStore()
    new_run(store)
    add_round(store, 0)
    assert find(store) == []
    add_draft(store, 1, 3, 1, kv_cells_duplicate=2)
    (first,) = find(store)
    add_draft(store, 2, 3, 1, kv_cells_duplicate=4)
    (second,) = find(store)
    assert (first.round, second.round) == (1, 1)
    assert "round 1" in first.evidence
    assert "2 rounds" in second.evidence
    assert len(store.findings) == 0


def test_a_finding_is_recorded_once() -> None:
    store = TraceStore()
    for run_id in (0, 1):
        new_run(store)
        add_round(store, 0, run_id=run_id)
        add_draft(store, 1, 3, 1, run_id=run_id, kv_cells_duplicate=2)
    record_findings(store, [1])
    assert [(f.run_id, f.round) for f in recorded(store)] == [(1, 1)]
    add_draft(store, 2, 3, 1, run_id=1, kv_cells_duplicate=4)
    add_draft(store, 2, 3, 1, run_id=1, seq_id=5, kv_cells_duplicate=4)
    record_findings(store, [1])
    record_findings(store, [0, 1])
    assert [(f.run_id, f.seq_id) for f in recorded(store)] == [(0, 0), (1, 0), (1, 5)]


def test_a_long_run_is_scanned_by_columns() -> None:
    """100,000 rounds of two sequences with one wrong rollback near the end."""
    n, store = 50_000, TraceStore()
    new_run(store)
    number, seq = np.repeat(np.arange(n), 2), np.tile([0, 1], n)
    zeros, ones = np.zeros(2 * n, np.int64), np.ones(2 * n, np.int64)
    depth = np.where(number % 3 == 1, 2, 0)
    index = depth.copy()
    index[-2] = depth[-2] - 1
    store.rounds.extend(
        {
            "run_id": zeros,
            "round": number,
            "seq_id": seq,
            "num_draft_tokens": 3 * ones,
            "num_accepted_draft_tokens": 3 - depth,
            "num_emitted": 4 - depth,
            "rollback_depth": depth,
            "memory_rollback": depth,
            "rollback_path": ["seq_rm" if d else "none" for d in depth.tolist()],
            "stop_kind": ["bonus"] * (2 * n),
            "rs_idx_after": index,
            "valid_depth": 3 * ones,
            "kv_cells_duplicate": zeros,
            "replay_index": zeros,
            "verify_width": 4 * ones,
        }
    )
    store.memory.extend(
        {
            "run_id": np.repeat(zeros, 4),
            "round": np.repeat(number, 4),
            "seq_id": np.repeat(seq, 4),
            "slot": np.tile(np.arange(4), 2 * n),
            "age": np.tile(np.arange(4), 2 * n),
            "state": ["live", "fresh", "pending", "fresh"] * (2 * n),
        }
    )
    errors = [(f.rule, f.round, f.seq_id) for f in find(store) if f.severity == "error"]
    assert errors == [("plane-off-by-one", n - 1, 0)]
