"""Each rule on rows made by hand: what raises it, and what looks like it and does not."""

from __future__ import annotations

import pytest

from engine.analysis.findings.check import CHECKS, RULES, find
from engine.analysis.findings.run_rows import SEVERITIES
from engine.options import MAX_REPLAYS
from engine.trace.store import TraceStore
from tests.support.round_rows import GREEDY, SPEC, add_draft, add_round, found, new_run
from tests.support.trace_builder import sample_trace


def test_rules_are_complete() -> None:
    assert RULES.keys() == CHECKS.keys()
    for name, rule in RULES.items():
        assert name == rule.id
        assert rule.severity in SEVERITIES
        for text in (rule.means, rule.suggestion):
            assert text.endswith(".") and text[0].isupper()
        assert rule.title and not rule.title.endswith(".")


def test_a_trace_without_facts_or_rows_is_no_trouble() -> None:
    store = TraceStore()
    assert find(store) == []
    store.begin_run({})
    assert find(store) == []
    assert [f.rule for f in find(sample_trace(n_seqs=2).store) if f.severity == "error"] == []


def test_duplicates_beat_attention_ahead(store: TraceStore) -> None:
    add_draft(store, 1, 3, 1, attention_pos_max=9, recurrent_pos_max=9)
    add_draft(store, 2, 3, 1, attention_pos_max=13, recurrent_pos_max=11)
    add_draft(store, 3, 3, 1, attention_pos_max=15, recurrent_pos_max=13, kv_cells_duplicate=4)
    (ahead,), (double,) = found(store, "attention-ahead"), found(store, "duplicate-kv-cells")
    assert (ahead.round, double.round) == (2, 3)
    assert "2 positions ahead of" in ahead.message
    assert "up to 4 KV cells" in double.message


def test_only_the_sequence_concerned(store: TraceStore) -> None:
    for number in (1, 2, 3):
        add_round(store, number, seq_id=0)
        add_round(store, number, seq_id=1, kv_cells_duplicate=number - 1)
    (finding,) = find(store)
    assert (finding.run_id, finding.seq_id, finding.round) == (0, 1, 2)
    assert "2 rounds, the first 2, the last 3" in finding.evidence


@pytest.mark.parametrize(
    ("duplicates", "late", "fires"), [(1, 3, True), (0, 3, False), (1, 1, False)]
)
def test_acceptance_that_rises_with_duplicates(
    store: TraceStore, duplicates: int, late: int, fires: bool
) -> None:
    for number in range(1, 25):
        accepted = late if number > 12 else 1
        add_draft(store, number, 4, accepted, kv_cells_duplicate=duplicates * number)
    findings = found(store, "acceptance-rises-with-duplicates")
    assert [f.round for f in findings] == [1] * fires
    if fires:
        assert "from 0.25 to 0.75" in findings[0].message


def slots(store: TraceStore, number: int, depth: int, age: int | None) -> None:
    for slot in range(4):
        state = "pending" if slot == depth else "live" if not slot else "fresh"
        store.memory.append(
            run_id=0,
            round=number,
            seq_id=0,
            slot=slot,
            state=state,
            age=age if slot == depth else slot,
        )


def test_planes_and_their_age(store: TraceStore) -> None:
    for number, age in ((1, 2), (2, 3), (3, None)):
        add_draft(store, number, 3, 1)
        slots(store, number, 2, age)
    (finding,) = find(store)
    assert (finding.rule, finding.round) == ("stale-plane", 2)
    assert "of 3 tokens ago" in finding.message
    assert "2 rounds, the first 2, the last 3" in finding.evidence


def test_a_foreign_plane_is_stale(store: TraceStore) -> None:
    add_draft(store, 1, 3, 1)
    slots(store, 1, 2, None)
    (finding,) = find(store)
    assert "of rejected tokens or another sequence" in finding.message


def test_a_wrong_index_is_another_plane_not_a_stale_one(store: TraceStore) -> None:
    add_draft(store, 1, 3, 0)
    add_draft(store, 2, 3, 1, rs_idx_after=1)
    slots(store, 2, 1, 1)
    (finding,) = find(store)
    assert (finding.rule, finding.round) == ("plane-off-by-one", 2)
    assert "reads the state of 1 token ago" in finding.message


def test_depth_beyond_truth(store: TraceStore) -> None:
    add_draft(store, 1, 3, 0, valid_depth=3)
    add_draft(store, 2, 3, 0, valid_depth=2, rollback_path="restore_depth", rs_idx_after=0)
    assert find(store) == []
    add_draft(store, 3, 3, 0, valid_depth=2)
    (finding,) = find(store)
    assert (finding.rule, finding.round) == ("depth-beyond-truth", 3)


def test_livelock(store: TraceStore) -> None:
    restored = {"rollback_path": "restore", "rs_idx_after": 0}
    add_draft(store, 1, 3, 1, replay_index=MAX_REPLAYS, **restored)
    assert find(store) == []
    add_draft(store, 2, 3, 1, replay_index=MAX_REPLAYS + 1, pos0=77, **restored)
    (finding,) = find(store)
    assert (finding.rule, finding.round) == ("replay-livelock", 2)
    assert "position 77" in finding.evidence


def test_replayed_corrections_counted_as_accepted(store: TraceStore) -> None:
    """The identity of the reported table: predicted - 1 = accepted + rounds, in every round."""
    replay = {"rollback_path": "restore", "stop_kind": "bonus", "rs_idx_after": 0}
    add_draft(store, 1, 3, 1, num_emitted=3, **replay)
    add_draft(store, 2, 3, 3)
    add_draft(store, 3, 3, 1)
    add_draft(store, 4, 3, 2, num_emitted=1)  # cut short by a stop
    assert find(store) == []
    add_draft(store, 5, 3, 2, num_emitted=3, **replay)
    add_draft(store, 6, 3, 3)
    (finding,) = find(store)
    assert (finding.rule, finding.round, finding.severity) == ("acceptance-counting", 4, "warning")
    assert "2 rounds, the first 4, the last 5" in finding.evidence


def test_all_drafted_tokens_counted_as_accepted(store: TraceStore) -> None:
    add_draft(
        store, 1, 3, 3, num_emitted=4, rollback_depth=2, rollback_path="seq_rm", rs_idx_after=2
    )
    add_draft(store, 2, 3, 3)
    (finding,) = find(store)
    assert (finding.rule, finding.round) == ("acceptance-counting", 1)


def test_n_min_and_silence() -> None:
    def rules(n_min: int, drafts: dict[int, int], rounds: int = 60, types=("draft-mtp",)):
        store = TraceStore()
        new_run(store, options={"spec": {**SPEC, "n_min": n_min, "types": list(types)}})
        for number in range(rounds):
            if number in drafts:
                add_draft(store, number, drafts[number], 1)
            else:
                add_round(store, number)
        return [(f.rule, f.round) for f in find(store)]

    assert rules(4, {}) == [("n-min-never-met", 1)]
    assert rules(4, {}, rounds=6) == []
    assert rules(4, {}, types=()) == []
    assert rules(0, {}) == [("drafter-mute", 1)]
    assert rules(0, {}, types=()) == []
    assert rules(4, {10: 4}) == [("drafter-mute", 11)]
    assert rules(0, dict.fromkeys(range(1, 60, 20), 3)) == []


def test_lanes_share_their_drafts() -> None:
    store = TraceStore()
    spec = {"spec": {**SPEC, "n_min": 3}}
    for run_id, lane in enumerate(("reference", "noise", "planes", "ring", "reference", "ring")):
        new_run(store, lane, options=spec)
        for number in range(20):
            add_round(store, number, run_id=run_id)
    assert [f.run_id for f in found(store, "n-min-never-met")] == [2, 5]


def test_defaults_that_surprise() -> None:
    def message(
        accepted: int, draft_p: float, head: float | None = None, drafter: str = "", **spec
    ) -> str:
        store = TraceStore()
        new_run(store, options={"spec": SPEC | spec})
        add_round(store, 0)
        for number in range(1, 50):
            add_draft(store, number, 3, accepted, drafter=drafter)
            kinds = ["accepted"] * accepted + ["rejected", "ignored", "ignored"]
            for i, kind in enumerate(kinds[:3]):
                store.tokens.append(
                    run_id=0,
                    round=number,
                    seq_id=0,
                    kind=kind,
                    draft_index=i,
                    draft_p=draft_p,
                    draft_conf=head,
                    token_id=1,
                )
        findings = found(store, "defaults-surprise")
        assert all((f.round, f.seq_id) == (None, None) for f in findings)
        return " ".join(f"{f.message} {f.suggestion}" for f in findings)

    assert "49 of 49 drafts were fully accepted" in message(3, 0.9)
    assert message(3, 0.9).endswith("Raise --spec-draft-n-max.")
    assert "147 of 147 drafted tokens" in message(0, 0.3)
    assert message(0, 0.3).endswith("Raise --spec-draft-p-min.")
    assert message(0, 0.9) == ""
    assert message(0, float("nan")) == ""
    assert message(0, 0.3, 0.9) == ""  # p_min is compared with what the head says
    assert "147 of 147 drafted tokens" in message(0, 0.9, 0.3)
    assert message(0, 0.3, None, "draft-dspark") == ""  # which has no floor without a head
    assert message(2, 0.3) == ""  # unsure, and right most of the time
    assert message(3, 0.9, n_max=5) == message(0, 0.3, p_min=0.4) == ""


@pytest.mark.parametrize(
    ("n_seqs", "n_ubatches", "fires"), [(2, 2, True), (2, 1, False), (1, 1, False)]
)
def test_concurrency_lost(store: TraceStore, n_seqs: int, n_ubatches: int, fires: bool) -> None:
    for number in range(12):
        for seq in range(n_seqs):
            add_round(store, number, seq_id=seq)
        for _ in range(n_ubatches):
            store.ubatches.append(
                run_id=0,
                round=number,
                n_seqs=n_seqs // n_ubatches,
                n_seq_tokens=1,
                purpose="verify" if number else "prompt",
                reason="keep-tail",
            )
    findings = find(store)
    assert [f.rule for f in findings] == ["concurrency-lost"] * fires
    if fires:
        assert findings[0].evidence == "reasons of the splits: keep-tail 22"


@pytest.mark.parametrize(("replay_ms", "fires"), [(4.0, True), (0.5, False)])
def test_checkpoints_that_dominate(store: TraceStore, replay_ms: float, fires: bool) -> None:
    for number in range(1, 12):
        add_draft(
            store,
            number,
            3,
            1,
            rollback_path="restore",
            rs_idx_after=0,
            verify_ms=8.0,
            save_ms=0.5,
            restore_ms=0.5,
            replay_ms=replay_ms,
            rollback_ms=0.0,
            checkpoint_bytes=512,
        )
    findings = find(store)
    assert [f.rule for f in findings] == ["checkpoint-dominates"] * fires
    if fires:
        assert "38%" in findings[0].message and findings[0].round == 1
        assert "11 saved with up to 512 B" in findings[0].evidence


def test_snapshots_larger_than_the_weights() -> None:
    store = TraceStore()
    new_run(store, snapshot_bytes=300, weight_bytes=200, n_rs_seq=3)
    new_run(store, snapshot_bytes=100, weight_bytes=200)
    (finding,) = find(store)
    assert (finding.rule, finding.run_id, finding.round) == ("planes-exceed-weights", 0, None)
    assert "1.5 times" in finding.message


def emitted(store: TraceStore, kind: str, rank: int, p: float, number: int, **columns) -> None:
    ids = list(range(10, 15))
    store.tokens.append(
        **{
            "run_id": 0,
            "round": number,
            "seq_id": 0,
            "pos": number,
            "kind": kind,
            "token_id": 9,
            "target_rank": rank,
            "target_p": p,
            "target_top_id": ids,
            "target_top_p": [0.5, 0.2, 0.1, 0.05, 0.01],
            **columns,
        }
    )


@pytest.mark.parametrize(
    ("sampler", "facts", "rank", "p", "fires"),
    [
        ({}, {}, 2, 0.2, True),
        ({}, {}, 1, 0.5, False),
        ({}, {"banned_tokens": [10]}, 2, 0.2, False),
        ({}, {"banned_tokens": [14]}, 2, 0.2, True),
        ({"temp": 0.8}, {}, 2, 0.2, False),
        ({"temp": 0.8}, {}, 41, 0.03, True),
        ({"temp": 0.8, "top_k": 0}, {}, 41, 0.03, False),
        ({"temp": 0.8}, {}, 30, 0.02, True),
        ({"temp": 0.8, "min_p": 0.0}, {}, 30, 0.02, False),
        ({"repeat_penalty": 1.3}, {}, 2, 0.2, False),
    ],
)
def test_a_replacement_that_is_not_the_targets(sampler, facts, rank, p, fires) -> None:
    store = TraceStore()
    new_run(store, options={"sampler": GREEDY | sampler}, **facts)
    emitted(store, "accepted", 1, 0.5, 1)
    emitted(store, "replacement", rank, p, 2)
    assert [(f.rule, f.round) for f in find(store)] == [("stale-logits", 2)] * fires


@pytest.mark.parametrize("kind", ["accepted", "bonus", "target"])
@pytest.mark.parametrize(
    ("sampler", "facts", "fires"),
    [
        ({}, {}, True),
        ({"temp": 0.8}, {}, True),
        ({}, {"banned_tokens": [*range(400)]}, False),
        ({"repeat_penalty": 1.3}, {}, False),
        ({"temp": 0.8, "top_k": 0, "min_p": 0.0}, {}, False),
        ({}, {"lane": "planes"}, False),
        ({}, {"lane": "planes,free", "lane_free": True}, True),
        ({}, {"fork": {"parent": 0, "round": 3, "token": 9}}, True),
        ({}, {"fork": {"parent": 0, "round": 4, "token": 9}}, False),
    ],
)
def test_a_token_that_the_target_cannot_have_chosen(kind, sampler, facts, fires) -> None:
    store = TraceStore()
    new_run(store, options={"sampler": GREEDY | sampler}, **facts)
    emitted(store, "accepted", 1, 0.5, 1)
    emitted(store, kind, 400, 0.0, 3)
    assert [(f.rule, f.round) for f in find(store)] == [("wrong-token", 3)] * fires
    if fires:
        assert f"1 of 2 emitted tokens; the first, {kind}, at position 3" in find(store)[0].evidence


def test_synthetic_acceptance_takes_what_the_target_would_not() -> None:
    store = TraceStore()
    new_run(store, synthetic=True)
    emitted(store, "accepted", 400, 0.0, 1)
    assert find(store) == []
    emitted(store, "bonus", 400, 0.0, 2)
    assert [(f.rule, f.round) for f in find(store)] == [("wrong-token", 2)]


def test_a_banned_token_ahead_by_less_than_probabilities_show() -> None:
    store = TraceStore()
    new_run(store, banned_tokens=[10])
    emitted(store, "accepted", 2, 0.5, 1, target_top_p=[0.5, 0.5, 0.0, 0.0, 0.0])
    assert find(store) == []
