"""A prompt cache changes what is processed and nothing else, whatever a conversation does."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import recorded
from engine.options import (
    KV_MODES,
    ROLLBACK_POLICIES,
    CacheOptions,
    Prompt,
    RunOptions,
    SpecOptions,
)
from tests.support.cached_runs import OpenCache, decode_cached, drafted, state_behind
from tests.support.closeness import nmse
from tests.support.golden_runs import SAMPLED, prompt_of, session, tokens_of
from tests.support.round_rows import serious

MTP, SMALL, DENSE = "qwen35-c-v2x-mtp-f32", "qwen35-a-f32", "qwen3-f-f32"
HYBRID_DRAFT = "qwen35-b-v2x-tied-f32"
CAP = 3
CACHE = CacheOptions(ctx_checkpoints=CAP, checkpoint_min_step=5)


def options_of(drafter: str, n: int = 5, **others) -> RunOptions:
    spec = SpecOptions(types=(drafter,) if drafter else (), n_max=3)
    return RunOptions(
        n_predict=n, spec=spec, ignore_eos=True, n_ctx=128, n_ubatch=8, n_batch=16, **others
    )


def check(opened, prompts, options, cache: OpenCache) -> list[list[int]]:
    """One run with and one without the cache: the same but for what was processed."""
    run, rows = decode_cached(opened, prompts, options, cache)
    bare, expected = decode_cached(opened, prompts, options, None)
    assert tokens_of(run) == tokens_of(bare)
    assert rows.keys() == expected.keys()
    assert max(nmse(rows[at], expected[at]) for at in expected) < 1e-5
    assert serious(recorded(run.trace)) == serious(recorded(bare.trace))
    summary = run.summary()
    n_prompt = sum(len(prompt.tokens) for prompt in prompts)
    assert summary["cache_n"] + summary["prompt_n"] == n_prompt == bare.summary()["prompt_n"]
    if len(prompts) == 1:
        (drafts, p), (wanted, wanted_p) = drafted(run), drafted(bare)
        assert drafts == wanted and p == pytest.approx(wanted_p, rel=1e-3, nan_ok=True)
    held = cache.latest.held
    for tokens, checkpoints in zip(held.tokens, held.checkpoints, strict=True):
        lengths = checkpoints.lengths
        assert len(lengths) <= CAP
        for length in lengths:
            save = checkpoints.newest(length)
            assert save is not None and save.pos_max == length - 1 and save.recurrent
            kept = save.recurrent.states.values()
            truth = state_behind(opened.model, tokens[:length])
            assert all(nmse(a, b) < 1e-8 for a, b in zip(kept, truth, strict=True))
    return tokens_of(run)


@st.composite
def edits(draw):
    """What a user does to a conversation between two turns."""
    kind = draw(st.sampled_from(["extend", "truncate", "edit", "repeat", "afresh"]))
    return kind, draw(st.floats(0, 1)), draw(st.integers(1, 12)), draw(st.integers(0, 3))


def edited(prompt: list[int], answer: list[int], edit, source: list[int]) -> list[int]:
    kind, where, n, seed = edit
    text, fresh = prompt + answer, source[seed : seed + n]
    at = int(where * (len(text) - 1))
    text = {
        "extend": text + fresh,
        "truncate": text[: at + 1],
        "edit": [*text[:at], (text[at] + 1) % 384, *text[at + 1 :]],
        "repeat": prompt,
        "afresh": fresh,
    }[kind]
    return text[:60]


def converse(opened, source, options, cache, n: int, turns) -> None:
    prompt, answer = source[:n], []
    for edit in (None, *turns):
        if edit:
            prompt = edited(prompt, answer, edit, source)
        (answer,) = check(opened, [Prompt(tuple(prompt))], options, cache)


conversations = given(n=st.integers(2, 30), turns=st.lists(edits(), min_size=2, max_size=4))


@pytest.mark.parametrize(
    ("policy", "kv"), [*zip(ROLLBACK_POLICIES, cycle(KV_MODES)), ("checkpoint", "unified")]
)
@settings(max_examples=3)
@conversations
@pytest.mark.thinned(4)
def test_a_conversation_goes_on_as_if_nothing_were_cached(policy, kv, n, turns):
    options = options_of("draft-mtp", rollback=policy, kv=kv)
    converse(session(MTP), list(prompt_of(MTP).tokens), options, OpenCache(CACHE), n, turns)


@pytest.mark.parametrize(
    ("target", "draft"), [(SMALL, HYBRID_DRAFT), (SMALL, DENSE), (DENSE, SMALL), (DENSE, DENSE)]
)
@settings(max_examples=2)
@conversations
@pytest.mark.thinned(8)
def test_a_draft_model_keeps_in_step(target, draft, n, turns):
    opened, source = session(target, draft), list(prompt_of(target).tokens)
    converse(opened, source, options_of("draft-simple"), OpenCache(CACHE), n, turns)


@pytest.mark.parametrize(("policy", "kv"), [("planes", "unified"), ("ring", "per-seq")])
def test_slots_are_used_again_within_a_run_and_between_runs(policy, kv):
    opened, source, cache = session(MTP), prompt_of(MTP).tokens, OpenCache(CACHE)
    options = options_of("draft-mtp", rollback=policy, kv=kv, parallel=2, sampler=SAMPLED)
    one, two = source[:20], source[5:29]
    prompts = [Prompt(one), Prompt(two), Prompt((*one, 7)), Prompt(two[:17]), Prompt(one[3:])]
    check(opened, prompts, options, cache)
    before = {tuple(tokens[:8]) for tokens in cache.latest.held.tokens}
    assert len(before) == 2
    follow = [Prompt((*cache.latest.held.tokens[seq], 3, 4)) for seq in (1, 0)]
    run, rows = decode_cached(opened, follow, options, cache)
    assert run.summary()["prompt_n"] == 4
    bare, expected = decode_cached(opened, follow, options, None)
    assert tokens_of(run) == tokens_of(bare)
    assert max(nmse(rows[at], expected[at]) for at in expected) < 1e-5


def cached(opened, tokens, options, cache: OpenCache) -> int:
    """cache_n of one prompt."""
    run, _ = decode_cached(opened, [Prompt(tuple(tokens))], options, cache)
    return run.summary()["cache_n"]


def test_what_a_hybrid_uses_again():
    opened, source, cache = session(MTP), list(prompt_of(MTP).tokens), OpenCache()
    options = options_of("draft-mtp", n=6, rollback="ring", n_rs_seq=3)
    assert cached(opened, source[:30], options, cache) == 0
    held = cache.latest.held
    text = list(held.tokens[0])
    assert text[:30] == source[:30] and len(text) >= 35  # the newest token is not decoded
    assert held.checkpoints[0].lengths == [18, 26]  # 4 tokens, and n_ubatch more, before the end
    # the live state
    assert cached(opened, [*text, 9], options, cache) == len(text)
    text = list(held.tokens[0])
    # snapshots reach back: only the last tokens differ
    depth = held.memory.recurrent.valid_depth(0)
    assert depth > 0
    assert cached(opened, [*text[:-1], (text[-1] + 1) % 384], options, cache) == len(text) - 1
    # they do not reach: the newest checkpoint that fits, the later ones are erased
    assert cached(opened, [*text[:28], 1, 2, 3], options, cache) == 26
    assert max(held.checkpoints[0].lengths) <= 31
    # the very same prompt: its last token is decoded again
    assert cached(opened, [*text[:28], 1, 2, 3], options, cache) == 27
    # too early a difference
    assert cached(opened, [*text[:15], 1, 2, 3], options, cache) == 0
    assert cached(opened, [(text[0] + 1) % 384], options, cache) == 0


def test_without_checkpoints_only_the_live_state_is_used():
    opened, source = session(MTP), list(prompt_of(MTP).tokens)
    cache, options = OpenCache(CacheOptions(ctx_checkpoints=0)), options_of("", n=3)
    assert cached(opened, source[:30], options, cache) == 0
    text = list(cache.latest.held.tokens[0])
    assert cached(opened, [*text, 5], options, cache) == len(text) == 32
    assert cached(opened, text[:28], options, cache) == 0
    assert cache.latest.held.checkpoints[0].lengths == []


def test_attention_alone_needs_no_checkpoints():
    opened, source, cache = session(DENSE), list(prompt_of(DENSE).tokens), OpenCache()
    options = options_of("", n=3)
    assert cached(opened, source[:30], options, cache) == 0
    assert cached(opened, [*source[:11], 7, 7], options, cache) == 11
    assert cached(opened, [*source[:11], 7, 7], options, cache) == 12
    assert cache.latest.held.checkpoints[0].lengths == []


def test_the_trace_tells_what_was_saved_and_restored():
    opened, source, cache = session(MTP), list(prompt_of(MTP).tokens), OpenCache()
    options = options_of("draft-mtp")
    first, _ = decode_cached(opened, [Prompt(tuple(source[:30]))], options, cache)
    n_bytes = cache.latest.memory.recurrent.layout.n_bytes
    rounds = first.trace.rounds
    assert rounds.column("pos0")[:4].tolist() == [0, 16, 18, 26]  # n_batch is 16
    assert rounds.column("checkpoint_bytes")[:5].tolist() == [0, 0, n_bytes, n_bytes, 0]
    assert (rounds.column("save_ms")[2:4] > 0).all()
    text = [*source[:28], 1, 2, 3]
    second, _ = decode_cached(opened, [Prompt(tuple(text))], options, cache)
    rounds = second.trace.rounds
    assert rounds.column("pos0")[0] == 26
    assert rounds.column("state_bytes_restored")[:2].tolist() == [n_bytes, 0]
    assert rounds.column("restore_ms")[0] > 0
    # traffic is the run's own, and readers still find the whole prompt
    written = rounds.column("state_bytes_written")
    assert 0 < written[0] <= 2 * n_bytes * (1 + options.snapshots)
    tokens = second.trace.tokens
    shown = [
        token
        for token, kind in zip(
            tokens.column("token_id").tolist(), tokens.texts("kind"), strict=True
        )
        if kind == "prompt"
    ]
    assert shown == text


def test_other_options_and_failed_runs_find_nothing(monkeypatch):
    opened, prompt, cache = session(MTP), list(prompt_of(MTP).tokens[:20]), OpenCache()
    options = options_of("draft-mtp")
    cached(opened, prompt, options, cache)
    assert cached(opened, prompt, replace(options, n_predict=2, sampler=SAMPLED), cache) > 0
    assert cached(opened, prompt, replace(options, rollback="ring"), cache) == 0
    assert cached(opened, prompt, options, cache) == 0  # the others' memory was given up
    run = opened.start([Prompt(tuple(prompt))], options, cache=cache)
    run.step()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("engine.memory.hybrid.HybridMemory.commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    assert cached(opened, prompt, options, cache) == 0
    run = opened.start([Prompt(tuple(prompt))], options, cache=cache)
    run.step()
    assert cached(opened, prompt, options, OpenCache()) == 0
    run.stop()
    assert cached(opened, prompt, options, cache) > 0


def test_a_run_in_progress_keeps_its_memory_to_itself():
    opened, prompt, cache = session(MTP), Prompt(prompt_of(MTP).tokens[:20]), OpenCache()
    options = options_of("draft-mtp", n=12)
    expected = tokens_of(decode_cached(opened, [prompt], options, None)[0])
    runs = [opened.start([prompt], options, cache=cache) for _ in range(2)]
    while not all(run.done for run in runs):
        for run in runs:
            run.step()
    assert [tokens_of(run) for run in runs] == [expected] * 2


def test_rejection_draws_the_same():
    opened, source, cache = session(MTP), prompt_of(MTP).tokens, OpenCache()
    options = options_of("draft-mtp", n=8, sampler=SAMPLED)
    options = replace(options, spec=replace(options.spec, accept="rejection"))
    check(opened, [Prompt(source[:20])], options, cache)
    check(opened, [Prompt((*cache.latest.held.tokens[0], 5))], options, cache)


@pytest.mark.parametrize(
    ("target", "draft", "drafter"),
    [
        (MTP, None, "draft-mtp"),
        (SMALL, HYBRID_DRAFT, "draft-simple"),
        (SMALL, DENSE, "draft-simple"),
    ],
)
@pytest.mark.thinned(4)
def test_a_drafter_forgets_what_was_cut(target, draft, drafter):
    opened, source, cache = session(target, draft), prompt_of(target).tokens, OpenCache(CACHE)
    options = options_of(drafter, n=12)
    prompts = [source[:30], (*source[:27], 1, 2, 3), (*source[:20], 5), (*source[:27], 4, *source)]
    for prompt in prompts:
        check(opened, [Prompt(prompt[:60])], options, cache)
