"""Whole runs under every rollback policy, split, KV mode and drafter; faults; accounting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from engine.analysis.findings.check import recorded
from engine.draft.chain import DrafterChain
from engine.draft.drafter import Draft
from engine.options import KV_MODES, ROLLBACK_POLICIES, SPLITS, Prompt, SamplerOptions, SpecOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.all_pairs import all_pairs
from tests.support.faults import LARGE_FAULTS
from tests.support.golden_runs import (
    SAMPLED,
    decode,
    golden,
    options_of,
    prompt_of,
    session,
    tokens_of,
)
from tests.support.noisy_logits import with_logits
from tests.support.round_rows import serious

MTP = "qwen35-c-v2x-mtp-f32"
SAMPLERS = (SamplerOptions(), SAMPLED)
PAIRS = (
    (MTP, None, "draft-mtp"),
    ("qwen35moe-d-v2x-mtp-f32", None, "draft-mtp"),
    ("qwen35-a-f32", "qwen35-b-v2x-tied-f32", "draft-simple"),
    ("qwen3next-e-v2x-f32", "qwen3next-e-v2x-f32", "draft-simple"),
)


def four_prompts(name: str) -> list[Prompt]:
    tokens = prompt_of(name).tokens
    return [Prompt(tokens[:n]) for n in (20, 7, 31, 3)]


@cache
def plain_tokens(name: str, sampler: SamplerOptions) -> list[list[int]]:
    """Of each prompt alone."""
    options = replace(options_of(14), sampler=sampler)
    return [tokens_of(decode(session(name), [p], options))[0] for p in four_prompts(name)]


@pytest.mark.parametrize(
    ("models", "policy", "how", "sampler"),
    all_pairs(PAIRS, list(ROLLBACK_POLICIES), list(product(SPLITS, KV_MODES)), SAMPLERS),
)
@pytest.mark.thinned(8)
def test_no_token_changes(models, policy, how, sampler):
    (name, draft, drafter), (split, kv) = models, how
    opened, prompts = session(name, draft), four_prompts(name)
    plain = plain_tokens(name, sampler)
    options = replace(
        options_of(14, drafter), sampler=sampler, rollback=policy, split=split, kv=kv, parallel=4
    )
    assert tokens_of(decode(opened, prompts, options)) == plain
    one = replace(options, parallel=1)
    assert tokens_of(decode(opened, prompts[:1], one)) == plain[:1]


def test_unequal_drafts_of_a_dense_model_share_a_pass():
    opened = session("qwen3-f-f32", "qwen3next-e-v2x-f32")
    prompts = four_prompts("qwen3-f-f32")
    spec = SpecOptions(types=("draft-simple",), n_max=4, p_min=0.3)
    options = replace(options_of(16), spec=spec, parallel=4, kv="unified")
    run = decode(opened, prompts, options)
    assert tokens_of(run) == tokens_of(decode(opened, prompts, options_of(16)))
    verify = np.array(run.trace.ubatches.texts("purpose")) == "verify"
    rounds = run.trace.ubatches.column("round")[verify]
    assert len(set(rounds.tolist())) == len(rounds)
    widths = run.trace.rounds.column("verify_width")[4:]
    assert len(set(widths.tolist())) > 1


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_unequal_drafts_in_several_passes(policy, monkeypatch):
    """A pass that leaves a sequence out may relocate it: it has rolled back before that."""
    opened, prompts = session(MTP), four_prompts(MTP)[:3]
    plain = tokens_of(decode(opened, prompts, options_of(20)))
    lengths = (4, 1, 4)

    def wrong(self, requests):
        drafts = {}
        for request in requests:
            n = min(request.n_max, lengths[request.seq])
            tops = [[0.0] * 5] * n
            drafts[request.seq] = Draft([0] * n, [1.0] * n, [[0] * 5] * n, tops, "wrong")
        return drafts

    monkeypatch.setattr(DrafterChain, "draft", wrong)
    options = options_of(20, "draft-mtp", n_max=4, parallel=3, rollback=policy, n_rs_seq=1)
    run = decode(opened, prompts, options)
    assert tokens_of(run) == plain
    ubatches = run.trace.ubatches
    shapes = zip(ubatches.texts("seq_ids"), ubatches.column("n_seq_tokens").tolist(), strict=True)
    assert {("0 2", 5), ("1", 2)} <= set(shapes)


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")


DEMO_TEXTS = ("def quicksort(arr):", "class Node:\n    def ", "import os\n", "for i in range(")


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.parametrize(("split", "kv"), list(product(SPLITS, KV_MODES)))
@pytest.mark.parametrize("drafter", ["draft-mtp", "draft-simple"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
@pytest.mark.thinned(16)
def test_demo_models_say_the_same(demo, policy, split, kv, drafter, sampler):
    prompts = [demo.prompt(text) for text in DEMO_TEXTS]
    options = replace(
        options_of(12, drafter), rollback=policy, split=split, kv=kv, sampler=sampler, parallel=4
    )
    assert tokens_of(decode(demo, prompts, options)) == demo_plain(demo, sampler)


@cache
def demo_plain(demo, sampler):
    prompts = [demo.prompt(text) for text in DEMO_TEXTS]
    return tokens_of(decode(demo, prompts, replace(options_of(12), sampler=sampler)))


@pytest.mark.parametrize("policy", [p for p in ROLLBACK_POLICIES if p != "checkpoint"])
@pytest.mark.parametrize("n_max", [5, 16])
def test_snapshots_reach_every_rejected_token(policy, n_max):
    run = decode(
        session(MTP),
        [prompt_of(MTP)],
        replace(options_of(40, "draft-mtp", n_max=n_max), rollback=policy),
    )
    assert tokens_of(run) == [golden(MTP)["greedy"].tolist()]
    rounds = run.trace.rounds
    assert set(rounds.texts("rollback_path")) == {"none", "seq_rm"}
    assert (rounds.column("state_bytes_restored") == 0).all()
    assert rounds.column("rollback_depth").max() == n_max
    if policy in ("ring", "replay"):
        assert (rounds.column("state_bytes_copied") == 0).all()
    assert rounds.column("memory_bytes_held").min() > 0


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
def test_too_few_snapshots_fall_back_to_a_checkpoint(policy):
    options = replace(options_of(40, "draft-mtp", n_max=6), rollback=policy, n_rs_seq=2)
    run = decode(session(MTP), [prompt_of(MTP)], options)
    assert tokens_of(run) == [golden(MTP)["greedy"].tolist()]
    paths = set(run.trace.rounds.texts("rollback_path"))
    assert ("restore" if policy == "checkpoint" else "restore_depth") in paths


@pytest.mark.parametrize("device", ["host", "device"])
@pytest.mark.parametrize("replay", ["trust", "verify"])
@pytest.mark.parametrize("sampler", [SamplerOptions(), SAMPLED], ids=["greedy", "sampled"])
def test_both_replays_give_the_tokens_of_plain_decoding(replay, device, sampler):
    plain = decode(session(MTP), [prompt_of(MTP)], replace(options_of(40), sampler=sampler))
    options = replace(
        options_of(40, "draft-mtp"),
        rollback="checkpoint",
        replay=replay,
        sampler=sampler,
        checkpoint_device=device,
    )
    run = decode(session(MTP), [prompt_of(MTP)], options)
    assert tokens_of(run) == tokens_of(plain)
    rounds, kinds = run.trace.rounds, np.array(run.trace.tokens.texts("kind"))
    restored = np.array(rounds.texts("rollback_path")) == "restore"
    assert restored.sum() > 3
    emitted = rounds.column("num_emitted")[restored]
    accepted = rounds.column("num_accepted_draft_tokens")[restored]
    more = {"trust": 1, "verify": 2}[replay]
    assert (emitted[:-1] == accepted[:-1] + more).all()
    assert rounds.column("num_accepted_draft_tokens")[1:].sum() == (kinds == "accepted").sum()
    assert (rounds.column("state_bytes_restored")[restored] > 0).all()
    assert serious(recorded(run.trace)) == []


def test_a_replay_that_disagrees_with_itself_is_bounded(monkeypatch):
    """Logits that depend on the width of the batch made upstream loop for ever (#28061)."""
    opened = session(MTP)
    forward = type(opened._model).forward

    def width_dependent(self, ubatch, memory, **wanted):
        out = forward(self, ubatch, memory, **wanted)
        noise = torch.Generator().manual_seed(ubatch.n_seq_tokens)
        return with_logits(out, out.logits + 8 * torch.randn(out.logits.shape, generator=noise))

    monkeypatch.setattr(type(opened._model), "forward", width_dependent)
    options = replace(options_of(30, "draft-mtp", n_max=5), rollback="checkpoint", replay="verify")
    run = decode(opened, [prompt_of(MTP)], options)
    assert len(tokens_of(run)[0]) == 30
    assert run.trace.rounds.column("replay_index").max() > 1
    assert run.trace.rounds.column("replay_index").max() <= 9


def test_a_replay_that_never_agrees_is_a_finding(monkeypatch):
    opened, noise = session(MTP), torch.Generator().manual_seed(0)
    forward = type(opened._model).forward

    def never_the_same(self, ubatch, memory, **wanted):
        out = forward(self, ubatch, memory, **wanted)
        return with_logits(out, torch.randn(out.logits.shape, generator=noise))

    monkeypatch.setattr(type(opened._model), "forward", never_the_same)
    options = replace(options_of(6, "draft-mtp"), rollback="checkpoint", replay="verify")
    run = decode(opened, [prompt_of(MTP)], options)
    assert len(tokens_of(run)[0]) == 6
    finding = run.trace.findings.row(0)
    assert (finding["rule"], finding["severity"]) == ("replay-livelock", "error")
    assert "gave another result 8 times" in finding["message"]


@pytest.mark.parametrize("fault", ["keep-stale-kv", "stale-logits"])
def test_faults_of_the_loop_change_the_output(fault):
    options = replace(options_of(40, "draft-mtp", n_max=8), rollback="checkpoint", faults=(fault,))
    run = decode(session(MTP), [prompt_of(MTP)], options)
    assert tokens_of(run) != [golden(MTP)["greedy"].tolist()]
    assert run.trace.runs[0]["options"]["faults"] == (fault,)


def test_stale_cells_grow_by_the_batch_at_each_restore():
    options = replace(
        options_of(40, "draft-mtp"), rollback="checkpoint", faults=("keep-stale-kv",), n_ctx=512
    )
    trace = decode(session(MTP), [prompt_of(MTP)], options).trace
    used = trace.rounds.column("kv_cells_used")
    width = trace.rounds.column("verify_width")
    paths = trace.rounds.texts("rollback_path")
    replayed = width - trace.rounds.column("rollback_depth")
    restores = [i for i, path in enumerate(paths) if path == "restore"]
    assert restores
    for i in restores:
        assert used[i] - used[i - 1] == width[i] + replayed[i]
    assert trace.rounds.column("kv_cells_duplicate")[-1] > 0


def test_clean_runs_have_no_duplicates():
    options = replace(options_of(40, "draft-mtp"), rollback="checkpoint")
    trace = decode(session(MTP), [prompt_of(MTP)], options).trace
    assert (trace.rounds.column("kv_cells_duplicate") == 0).all()


FAULTY = {
    "stale-plane": {"rollback": "planes", "n_ubatch": 3},
    "plane-off-by-one": {"rollback": "planes"},
    "no-conv-rollback": {"rollback": "planes"},
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faults_of_the_memory_change_the_output(fault):
    assert set(FAULTY) | {"keep-stale-kv", "stale-logits"} == LARGE_FAULTS
    base = replace(options_of(40, "draft-mtp", n_max=5), **FAULTY[fault])
    expected = [golden(MTP)["greedy"].tolist()]
    assert tokens_of(decode(session(MTP), [prompt_of(MTP)], base)) == expected
    faulty = replace(base, faults=(fault,))
    assert tokens_of(decode(session(MTP), [prompt_of(MTP)], faulty)) != expected


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
def test_bytes_add_up(policy):
    options = replace(options_of(30, "draft-mtp"), rollback=policy, parallel=3)
    trace = decode(session(MTP), four_prompts(MTP)[:3], options).trace
    rounds = trace.rounds
    assert (rounds.column("state_bytes_written") > 0).all()
    restored = rounds.column("state_bytes_restored")
    saved = rounds.column("checkpoint_bytes")
    assert (restored <= saved * np.maximum(rounds.column("replay_index"), 1)).all()
    if policy == "checkpoint":
        assert (saved[rounds.column("num_draft_tokens") > 0] > 0).all()
    else:
        # only a round in several passes can cost planes their promised depth
        passes = np.array([len(ids.split()) for ids in rounds.texts("ubatch_ids")])
        assert (saved[passes == 1] == 0).all()
        assert policy in ("planes", "carry") or (saved == 0).all()
    states = set(trace.memory.texts("state"))
    assert states <= {"free", "live", "fresh", "carried", "stale", "pending"}


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_ten_identical_requests_give_one_output(policy):
    options = replace(options_of(20, "draft-mtp"), rollback=policy, parallel=3, sampler=SAMPLED)
    run = decode(session(MTP), [prompt_of(MTP)] * 10, options)
    assert len({tuple(tokens) for tokens in tokens_of(run)}) == 1
