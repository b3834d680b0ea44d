"""A round with everything recorded, made by hand, and how to read it."""

from __future__ import annotations

from app.panels.inspector.step_facts import Step, read_step
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder


def judged() -> TraceStore:
    """Round 1 of two sequences; sequence 1 has a rejection with everything recorded."""
    builder = TraceBuilder()
    for seq_id in (0, 1):
        builder.prompt(["p"], seq_id)
    builder.draft([" ok"], " bonus", seq_id=0)
    store = builder.store
    for token_id, piece in ((50, b" middle"), (51, b" right"), (52, b"|"), (53, b"\xe4")):
        store.pieces[token_id] = piece
    base = {"run_id": 0, "round": 1, "seq_id": 1}
    top = {"target_top_id": [51, 50, 52], "target_top_p": [0.5, 0.25, 0.1], "target_entropy": 1.5}
    store.tokens.append(
        **base,
        pos=1,
        kind="rejected",
        token_id=50,
        draft_index=0,
        draft_p=0.6,
        target_p=0.25,
        target_rank=2,
        rule_p=0.125,
        rule_q=0.7,
        draft_top_id=[50, 53],
        draft_top_p=[0.6, 0.3],
        **top,
    )
    store.tokens.append(**base, pos=2, kind="ignored", token_id=53, draft_index=1, draft_p=0.4)
    store.tokens.append(**base, pos=1, kind="replayed", token_id=50)
    store.tokens.append(
        **base, pos=1, kind="replacement", token_id=51, target_p=0.5, target_rank=1, **top
    )
    store.drafts.append(
        **base,
        drafter="ngram-mod",
        match_pos=1234,
        num_raw=5,
        num_draft_tokens=2,
        reason="limit",
        draft_ms=0.5,
    )
    for number, seq_ids in enumerate(("0 1", "0", "1")):
        store.ubatches.append(
            run_id=0,
            round=1,
            ubatch=number,
            n_seqs=len(seq_ids.split()),
            n_seq_tokens=3,
            seq_ids=seq_ids,
            n_padding=number,
            purpose="verify",
            reason="all tokens",
            ms=2.0,
        )
    store.rounds.append(
        **base,
        num_draft_tokens=2,
        num_accepted_draft_tokens=0,
        num_emitted=1,
        stop_kind="replacement",
        accept_rule="rejection",
        rollback_depth=2,
        memory_rollback=3,
        rollback_path="restore_depth",
        n_rs_seq=1,
        valid_depth=1,
        rs_idx_before=0,
        rs_idx_after=1,
        replay_index=1,
        verify_width=3,
        state_bytes_written=1_500_000,
        checkpoint_bytes=449_000,
        kv_cells_used=18,
        draft_ms=1.0,
        verify_ms=2.5,
    )
    return store


def step_of(store: TraceStore, seq_id: int = 1, round_: int = 1) -> Step:
    """A round of the first run, which must be there."""
    step = read_step(RunRef(store, 0), seq_id, round_)
    assert step is not None
    return step


def breakable(text: str) -> str:
    """The text with plain spaces where a line must not break."""
    return text.replace("\N{NO-BREAK SPACE}", " ")
