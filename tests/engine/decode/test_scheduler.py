"""Many slots at once: unequal drafts, prompts next to verification, refilling, cancel, context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft
from engine.errors import OptionError
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt, SamplerOptions, SpecOptions
from engine.run import Run
from engine.trace.records import GHOST_KINDS, MISSING
from engine.trace.store import TraceStore
from tests.support.all_pairs import all_pairs
from tests.support.golden_runs import SAMPLED, decode, options_of, prompt_of, session, tokens_of

MTP, SMALL, DENSE = "qwen35-c-v2x-mtp-f32", "qwen35-a-f32", "qwen3-f-f32"
PAIRS = ((MTP, None, "draft-mtp"), (SMALL, "qwen35-b-v2x-tied-f32", "draft-simple"))
LENGTHS = (20, 7, 31, 3, 12, 1, 9)


def prompts_of(name: str, n: int) -> list[Prompt]:
    tokens = prompt_of(name).tokens
    return [Prompt(tokens[:length]) for length in LENGTHS[:n]]


@cache
def plain(name: str, draft: str | None, sampler: SamplerOptions, n: int) -> list[list[int]]:
    """What every prompt is continued with alone and without drafts."""
    opened, options = session(name, draft), replace(options_of(n), sampler=sampler)
    return [tokens_of(decode(opened, [p], options))[0] for p in prompts_of(name, len(LENGTHS))]


def verified(trace: TraceStore) -> np.ndarray:
    """Which rows of `rounds` verified something."""
    return trace.rounds.column("num_draft_tokens") != MISSING


def passes_per_round(trace: TraceStore, purpose: str = "verify") -> list[int]:
    chosen = np.array(trace.ubatches.texts("purpose")) == purpose
    return np.bincount(trace.ubatches.column("round")[chosen]).tolist()


@pytest.mark.parametrize(
    ("models", "policy", "split", "kv", "way"),
    all_pairs(
        PAIRS, list(ROLLBACK_POLICIES), SPLITS, KV_MODES, ((SAMPLED, 4), (SamplerOptions(), 5))
    ),
)
@pytest.mark.thinned(4)
def test_drafts_of_unequal_length_change_no_token(models, policy, split, kv, way):
    (name, draft, drafter), (sampler, parallel) = models, way
    opened = session(name, draft)
    spec = SpecOptions(types=(drafter,), n_max=4, p_min=0.2)
    options = replace(
        options_of(10),
        spec=spec,
        sampler=sampler,
        rollback=policy,
        split=split,
        kv=kv,
        parallel=parallel,
    )
    run = decode(opened, prompts_of(name, parallel), options)
    assert tokens_of(run) == plain(name, draft, sampler, 10)[:parallel]
    trace = run.trace
    assert len(set(trace.rounds.column("verify_width")[verified(trace)].tolist())) > 2
    n_padding = trace.ubatches.column("n_padding")
    assert (n_padding.sum() > 0) == (split == "equal" and policy != "checkpoint")
    undone = trace.rounds.column("memory_rollback") - trace.rounds.column("rollback_depth")
    assert undone.sum() == n_padding.sum()
    if split == "equal" and policy != "checkpoint":
        assert max(passes_per_round(trace)) == 1
        assert "restore" not in " ".join(trace.rounds.texts("rollback_path"))
    elif split == "equal":
        assert "padding beyond the snapshots" in trace.ubatches.texts("reason")


def scripted(monkeypatch, lengths: Callable[[int, int], int]) -> None:
    """Drafts of wrong tokens; lengths(seq, n_max) long."""

    def draft(self, requests):
        drafts = {}
        for request in requests:
            if n := min(request.n_max, lengths(request.seq, request.n_max)):
                tops = [[0.0] * 5] * n
                drafts[request.seq] = Draft([0] * n, [1.0] * n, [[0] * 5] * n, tops, "wrong")
        return drafts

    monkeypatch.setattr(DrafterChain, "draft", draft)


@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay"])
def test_filler_is_neither_a_token_nor_counted(policy, monkeypatch):
    scripted(monkeypatch, lambda seq, n_max: (4, 1, 0)[seq])
    options = options_of(12, "draft-mtp", n_max=4, parallel=3, rollback=policy)
    run = decode(session(MTP), prompts_of(MTP, 3), options)
    trace = run.trace
    assert tokens_of(run) == plain(MTP, None, SamplerOptions(), 12)[:3]
    first = trace.rounds.column("round") == 1
    rows = {
        name: trace.rounds.column(name)[first].tolist()
        for name in ("num_draft_tokens", "verify_width", "rollback_depth", "memory_rollback")
    }
    assert rows == {
        "num_draft_tokens": [4, 1, 0],
        "verify_width": [5, 2, 1],
        "rollback_depth": [4, 1, 0],
        "memory_rollback": [4, 4, 4],
    }
    ubatch = trace.ubatches.row(trace.ubatches.texts("purpose").index("verify"))
    assert (ubatch["n_seqs"], ubatch["n_seq_tokens"], ubatch["n_padding"]) == (3, 5, 7)
    kinds = np.array(trace.tokens.texts("kind"))[trace.tokens.column("round") == 1]
    assert np.isin(kinds, GHOST_KINDS).sum() == 5
    assert len(kinds) == 5 + 3
    n_cells = trace.rounds.column("kv_cells_used")
    assert (n_cells == trace.rounds.column("attention_pos_max") + 1).all()


def test_one_long_draft_does_not_drag_the_others_along(monkeypatch):
    scripted(monkeypatch, lambda seq, n_max: 48 if seq == 1 else 1)
    options = options_of(60, "draft-mtp", n_max=48, parallel=5, rollback="ring")
    run = session(MTP).start(prompts_of(MTP, 5), options)
    run.step(), run.step()
    ubatches = run.trace.ubatches
    verify = [i for i, what in enumerate(ubatches.texts("purpose")) if what == "verify"]
    found = [
        (r["seq_ids"], r["n_seq_tokens"], r["n_padding"], r["reason"])
        for r in map(ubatches.row, verify)
    ]
    assert found == [
        ("1", 49, 0, "padding costs more than a pass"),
        ("0 2 3 4", 2, 0, "all tokens"),
    ]


@pytest.mark.parametrize(
    ("policy", "n_batch", "split"), all_pairs(list(ROLLBACK_POLICIES), [1, 5, 16], SPLITS)
)
@pytest.mark.thinned(8)
def test_a_long_prompt_does_not_stall_the_others(policy, split, n_batch):
    options = options_of(12, "draft-mtp", parallel=2, rollback=policy, split=split, n_batch=n_batch)
    run = decode(session(MTP), prompts_of(MTP, 4), options)
    trace = run.trace
    assert tokens_of(run) == plain(MTP, None, SamplerOptions(), 12)[:4]
    columns = ("round", "seq_id", "verify_width", "pos0", "num_emitted", "num_target_tokens")
    rows = list(zip(*(trace.rounds.column(c).tolist() for c in columns), strict=True))
    is_verified = verified(trace)
    for number in range(max(row[0] for row in rows) + 1):
        here = [i for i, row in enumerate(rows) if row[0] == number]
        prompt_tokens = sum(rows[i][2] for i in here if not is_verified[i])
        others = sum(rows[i][2] for i in here if is_verified[i])
        assert prompt_tokens <= max(0, n_batch - others)
        assert here  # no empty rounds
    for seq_id, length in enumerate(LENGTHS[:4]):
        parts = [rows[i] for i in range(len(rows)) if rows[i][1] == seq_id and not is_verified[i]]
        assert sum(part[2] for part in parts) == length
        assert [part[3] for part in parts] == np.cumsum([0, *(p[2] for p in parts)])[:-1].tolist()
        assert [part[4] for part in parts] == [*[0] * (len(parts) - 1), 1]
        assert [part[5] for part in parts] == [part[4] for part in parts]
    kinds, ids = np.array(trace.tokens.texts("kind")), trace.tokens.column("token_id")
    for result in run.results():
        own = trace.tokens.column("seq_id") == result.seq_id
        assert ids[own & (kinds == "prompt")].tolist() == result.prompt_tokens
        assert result.timings["prompt_n"] == len(result.prompt_tokens)
        assert result.timings["predicted_n"] == 12
    if n_batch == 16:  # the third prompt came in parts, next to rounds of a running sequence
        both = {
            r for r, i in zip(trace.rounds.column("round").tolist(), is_verified, strict=True) if i
        }
        assert both & {row[0] for row, i in zip(rows, is_verified, strict=True) if not i}


def test_time_is_booked_to_the_sequences_that_it_was_spent_on():
    options = options_of(12, "draft-mtp", parallel=2, n_batch=16)
    trace = decode(session(MTP), prompts_of(MTP, 3), options).trace
    ms = trace.ubatches.column("ms")
    replays = np.array(trace.ubatches.texts("purpose")) == "replay"
    assert trace.rounds.column("verify_ms").sum() == pytest.approx(ms[~replays].sum())
    is_prompt = ~verified(trace)
    prompts = np.array(trace.ubatches.texts("purpose")) == "prompt"
    assert trace.rounds.column("verify_ms")[is_prompt].sum() == pytest.approx(ms[prompts].sum())


@pytest.mark.parametrize(
    ("policy", "kv", "sampler"),
    all_pairs(list(ROLLBACK_POLICIES), KV_MODES, (SamplerOptions(), SAMPLED)),
)
@pytest.mark.thinned(8)
def test_freed_slots_are_refilled_at_once(policy, kv, sampler):
    options = replace(
        options_of(9, "draft-mtp", parallel=2), rollback=policy, kv=kv, sampler=sampler
    )
    run = decode(session(MTP), prompts_of(MTP, 7), options)
    assert tokens_of(run) == plain(MTP, None, sampler, 9)
    rounds, seqs = (run.trace.rounds.column(name) for name in ("round", "seq_id"))
    spans = [(rounds[seqs == s].min(), rounds[seqs == s].max()) for s in range(7)]
    ends = sorted(end for _, end in spans)
    starts = sorted(start for start, _ in spans)
    assert starts[2:] == [end + 1 for end in ends[:5]]


def started(n_batch: int = 4) -> Run:
    options = options_of(12, "draft-mtp", parallel=2, n_batch=n_batch)
    return session(MTP).start(prompts_of(MTP, 4), options)


def finish(run: Run) -> None:
    while run.step():
        pass


@pytest.mark.parametrize("stage", ["waiting", "not started", "prompt", "running", "ended"])
def test_cancel_at_each_stage(stage):
    run = started(n_batch=2048 if stage in ("running", "ended") else 4)
    seq_id = 3 if stage == "waiting" else 1 if stage == "not started" else 0
    for _ in range({"waiting": 1, "prompt": 2, "running": 2}.get(stage, 0)):
        run.step()
    if stage == "ended":
        finish(run)
    before = [len(table) for table in run.trace.tables.values()]
    emitted = tokens_of(run)[seq_id]
    run.cancel(seq_id)
    run.cancel(seq_id)
    assert [len(table) for table in run.trace.tables.values()] == before
    finish(run)
    expected = plain(MTP, None, SamplerOptions(), 12)[:4]
    for result in run.results():
        if result.seq_id == seq_id and stage != "ended":
            assert (result.stop, result.tokens) == ("stopped", emitted)
            assert result.tokens == expected[seq_id][: len(emitted)]
        else:
            assert (result.stop, result.tokens) == ("limit", expected[result.seq_id])
    stops = ["limit"] * 4
    if stage != "ended":
        stops[seq_id] = "stopped"
    assert run.trace.runs[0]["stops"] == stops
    own = run.trace.rounds.column("seq_id") == seq_id
    assert own.any() == (stage not in ("waiting", "not started"))
    if stage == "prompt":
        assert run.results()[0].timings["prompt_n"] == 8
        assert run.results()[0].timings["predicted_n"] == 0


def test_the_slot_of_a_cancelled_sequence_is_taken_in_the_next_round():
    run = started(n_batch=2048)
    run.step(), run.step()
    assert sorted(set(run.trace.rounds.column("seq_id").tolist())) == [0, 1]
    run.cancel(0)
    run.step()
    rounds = run.trace.rounds
    assert rounds.column("seq_id")[rounds.column("round") == 2].tolist() == [1, 2]


def test_cancelling_all_ends_the_run():
    run = started()
    run.step()
    for seq_id in range(4):
        run.cancel(seq_id)
    n = run.trace.size()
    assert not run.step()
    assert run.done
    assert run.trace.size() == n
    assert run.trace.runs[0]["stops"] == ["stopped"] * 4


@pytest.mark.parametrize("seq_id", [-1, 4])
def test_an_unknown_sequence_is_not_cancelled(seq_id):
    run = started()
    with pytest.raises(OptionError, match=f"no sequence {seq_id}"):
        run.cancel(seq_id)


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize("kv", KV_MODES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.thinned(4)
def test_the_context_fills_up_at_each_offset_in_a_draft(policy, kv, split, monkeypatch):
    """A drafter that is right leaves 0 to 4 drafted tokens in front of the last one."""
    prompts, drafted_last = prompts_of(MTP, 3), set()

    def right(self, requests):
        drafts = {}
        for request in requests:
            prompt = prompts[request.seq].tokens
            at = request.pos0 - len(prompt) + 1
            tokens = context_plain(n_ctx)[request.seq][at : at + request.n_max]
            n = len(tokens)
            tops = [[0.0] * 5] * n
            drafts[request.seq] = Draft(tokens, [1.0] * n, [[0] * 5] * n, tops, "right")
        return drafts

    monkeypatch.setattr(DrafterChain, "draft", right)
    for n_ctx in range(32, 38):
        options = replace(
            options_of(-1, "draft-mtp", n_max=4, parallel=3),
            rollback=policy,
            kv=kv,
            split=split,
            n_ctx=n_ctx,
            ignore_eos=True,
        )
        run = decode(session(MTP), prompts, options)
        rounds = run.trace.rounds
        for result, prompt in zip(run.results(), prompts, strict=True):
            assert (result.stop, result.tokens) == ("context", context_plain(n_ctx)[result.seq_id])
            assert len(prompt.tokens) + len(result.tokens) == n_ctx
            last = rounds.row(int(np.flatnonzero(rounds.column("seq_id") == result.seq_id)[-1]))
            if last["num_draft_tokens"] is not None:
                assert last["num_emitted"] == last["num_draft_tokens"] + 1
                drafted_last.add(last["num_draft_tokens"])
        assert (rounds.column("pos0") + rounds.column("verify_width")).max() == n_ctx - 1
        assert rounds.column("kv_cells_used").max() == n_ctx - 1
    assert drafted_last == {0, 1, 2, 3, 4}


@cache
def context_plain(n_ctx: int) -> list[list[int]]:
    options = replace(options_of(-1), n_ctx=n_ctx, ignore_eos=True)
    return [tokens_of(decode(session(MTP), [p], options))[0] for p in prompts_of(MTP, 3)]


@pytest.mark.parametrize("n_predict", [1, 2, 3, 5])
def test_drafts_are_no_longer_than_the_tokens_still_wanted(n_predict):
    run = decode(session(MTP), prompts_of(MTP, 3), options_of(n_predict, "draft-mtp", n_max=8))
    assert [len(tokens) for tokens in tokens_of(run)] == [n_predict] * 3
    rounds = run.trace.rounds
    for seq_id in range(3):
        own = rounds.column("seq_id") == seq_id
        left = n_predict - np.cumsum(rounds.column("num_emitted")[own])
        drafted = rounds.column("num_draft_tokens")[own]
        assert all(d <= before - 1 for before, d in zip(left, drafted[1:], strict=False))


def test_rounds_of_a_sequence_follow_one_another():
    run = decode(session(MTP), prompts_of(MTP, 5), options_of(9, "draft-mtp", parallel=2))
    rounds, seqs = (run.trace.rounds.column(name) for name in ("round", "seq_id"))
    for seq_id in range(5):
        assert all(b == a + 1 for a, b in pairwise(rounds[seqs == seq_id].tolist()))
    assert (np.diff(rounds) >= 0).all()
