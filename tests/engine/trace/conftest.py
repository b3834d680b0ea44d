"""Hand-made traces."""

from __future__ import annotations

import numpy as np
import pytest

from engine.trace.store import TraceStore


@pytest.fixture
def small_trace() -> TraceStore:
    """One run, one sequence: a prompt of three tokens, a full and a partial acceptance."""
    store = TraceStore()
    run = store.begin_run({"options": {"n_predict": 6}, "model": {"name": "toy.gguf"}})
    store.pieces.update({1: b"def", 2: b" f", 3: b"\n\t", 4: b"\xe4\xbd", 5: b",\"'", 6: b"\\"})
    for pos, token in enumerate((1, 2, 3)):
        store.tokens.append(run_id=run, round=0, seq_id=0, pos=pos, kind="prompt", token_id=token)
    store.tokens.append(
        run_id=run,
        round=0,
        seq_id=0,
        pos=3,
        kind="target",
        token_id=4,
        target_p=0.5,
        target_rank=1,
        target_entropy=1 / 3,
        target_top_id=[4, 1],
        target_top_p=[0.5, 0.1],
    )
    store.rounds.append(
        run_id=run,
        round=0,
        seq_id=0,
        t_ms=20.0,
        pos0=0,
        num_emitted=1,
        stop_kind="target",
        verify_width=3,
        verify_ms=18.0,
    )
    store.rounds.append(
        run_id=run,
        round=1,
        seq_id=0,
        t_ms=30.0,
        pos0=3,
        drafter="draft-mtp",
        num_draft_tokens=2,
        num_accepted_draft_tokens=2,
        num_emitted=3,
        stop_kind="bonus",
        rollback_depth=0,
        rollback_path="none",
        verify_width=3,
        draft_ms=2.0,
        verify_ms=7.0,
        sample_ms=0.5,
    )
    store.rounds.append(
        run_id=run,
        round=2,
        seq_id=0,
        t_ms=41.0,
        pos0=6,
        drafter="draft-mtp",
        num_draft_tokens=3,
        num_accepted_draft_tokens=1,
        num_emitted=2,
        stop_kind="replacement",
        rollback_depth=2,
        rollback_path="seq_rm",
        verify_width=4,
        draft_ms=3.0,
        verify_ms=7.5,
        sample_ms=0.25,
    )
    store.tokens.append(
        run_id=run,
        round=2,
        seq_id=0,
        pos=9,
        kind="rejected",
        token_id=5,
        draft_index=1,
        draft_p=0.25,
        draft_top_id=[5],
        draft_top_p=np.array([0.25], np.float32),
    )
    store.drafts.append(
        run_id=run,
        round=2,
        seq_id=0,
        drafter="ngram-simple",
        num_raw=0,
        num_draft_tokens=0,
        reason="no-match",
        draft_ms=0.125,
    )
    store.memory.append(run_id=run, round=2, seq_id=0, slot=0, state="live", age=0)
    store.findings.append(
        run_id=run,
        round=2,
        seq_id=0,
        rule="toy",
        severity="info",
        message='said "so",\nthen nothing',
        evidence="ä; 1,5",
    )
    return store
