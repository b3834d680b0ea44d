"""Whole runs with every drafter: no token changes, whatever is drafted and however it is undone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine.draft.ngram_drafter import NgramSizes
from engine.draft.ngram_mod import NgramModOptions
from engine.draft.registry import meaning
from engine.errors import LookupCacheError
from engine.options import (
    DRAFTERS,
    ROLLBACK_POLICIES,
    Prompt,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from engine.session import Session
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support.golden_runs import decode, prompt_of, session, tokens_of

MTP, PLAIN = "qwen35-c-v2x-mtp-f32", "qwen35-a-f32"
NGRAMS = tuple(name for name in DRAFTERS if name.startswith("ngram"))
GREEDY = SamplerOptions()
SAMPLED = SamplerOptions(temp=0.7, top_k=3, seed=11)
N = 24


def spec_of(*types: str, n_max: int = 3, n: int = 2, m: int = 3) -> SpecOptions:
    """Short n-grams, so that random models repeat them. m: longest draft that is looked up."""
    sizes = NgramSizes(n, m)
    return SpecOptions(
        types=types,
        n_max=n_max,
        ngram_simple=sizes,
        ngram_map_k=sizes,
        ngram_map_k4v=sizes,
        ngram_mod=NgramModOptions(n, 1, m),
    )


def repeating(name: str, n_prompts: int) -> list[Prompt]:
    """Prompts that repeat themselves and hold most ids, so that there is something to look up."""
    tokens, n_vocab = prompt_of(name).tokens, session(name).config.n_vocab
    ids = tuple(range(min(n_vocab, 384)))
    return [Prompt(ids[i:] + tokens[i : i + 9] * 4) for i in range(n_prompts)]


@cache
def plain(name: str, n_prompts: int, sampler: SamplerOptions) -> list[list[int]]:
    options = RunOptions(n_predict=N, sampler=sampler, parallel=n_prompts)
    return tokens_of(decode(session(name), repeating(name, n_prompts), options))


CASES = [
    # drafters, n-gram length, longest look-up, longest model draft, slots, policy, sampler
    *[
        ((name,), 1, 3, 3, 5, policy, SAMPLED)
        for name, policy in zip(NGRAMS, ROLLBACK_POLICIES, strict=True)
    ],
    *[
        ((name,), 1, 48, 3, 1, policy, GREEDY)
        for name, policy in zip(NGRAMS, reversed(ROLLBACK_POLICIES), strict=True)
    ],
    (NGRAMS, 2, 16, 3, 5, "planes", GREEDY),
    (("draft-mtp", "ngram-map-k"), 2, 16, 3, 5, "ring", SAMPLED),
    (("draft-mtp", "ngram-cache"), 1, 3, 1, 5, "carry", GREEDY),
    (("ngram-mod", "draft-mtp", "ngram-simple"), 2, 48, 16, 1, "replay", SAMPLED),
    (("ngram-simple",), 1, 1, 3, 5, "checkpoint", GREEDY),
    (("draft-mtp",), 2, 3, 48, 1, "carry", SAMPLED),
    (("suffix",), 1, 3, 3, 5, "replay", SAMPLED),
    (("draft-mtp", "suffix"), 1, 3, 3, 1, "planes", GREEDY),
]


@pytest.mark.parametrize(
    ("types", "n", "m", "n_max", "slots", "policy", "sampler"),
    CASES,
    ids=lambda v: ("greedy" if v is GREEDY else "sampled") if hasattr(v, "temp") else str(v),
)
@pytest.mark.thinned(4)
def test_no_token_changes(types, n, m, n_max, slots, policy, sampler):
    spec = spec_of(*types, n_max=n_max, n=n, m=m)
    options = RunOptions(n_predict=N, sampler=sampler, parallel=slots, rollback=policy, spec=spec)
    run = decode(session(MTP), repeating(MTP, slots), options)
    assert tokens_of(run) == plain(MTP, slots, sampler)
    rounds = run.trace.rounds
    if sampler is GREEDY or types != ("ngram-cache",):  # which needs to have seen a token twice
        assert rounds.column("num_draft_tokens").max() > 0
    assert rounds.column("num_draft_tokens").max() <= spec.longest
    assert rounds.column("n_rs_seq").max() == options.snapshots


@pytest.mark.parametrize(
    ("policy", "replay"), [*((policy, "trust") for policy in ROLLBACK_POLICIES), ("ring", "verify")]
)
@pytest.mark.thinned(4)
def test_a_draft_beyond_the_planes_falls_back_to_a_checkpoint(policy, replay):
    spec = spec_of("ngram-simple", "draft-mtp", n=1, m=48)
    options = RunOptions(n_predict=N, rollback=policy, spec=spec, replay=replay, parallel=2)
    run = decode(session(MTP), repeating(MTP, 2), options)
    assert tokens_of(run) == plain(MTP, 2, GREEDY)
    rounds = run.trace.rounds
    depth, paths = rounds.column("rollback_depth"), np.array(rounds.texts("rollback_path"))
    deep = depth > options.snapshots
    assert deep.any()
    assert set(paths[deep]) == {"restore" if policy == "checkpoint" else "restore_depth"}


def test_planes_are_for_drafters_with_a_model():
    assert RunOptions(spec=spec_of("draft-mtp", "ngram-mod", m=48)).snapshots == 3
    assert RunOptions(spec=spec_of("ngram-mod", m=48)).snapshots == 0
    assert RunOptions(spec=spec_of("ngram-mod", m=48), n_rs_seq=6).snapshots == 6
    assert RunOptions(spec=spec_of("draft-mtp"), rollback="checkpoint", n_rs_seq=6).snapshots == 0
    assert RunOptions(n_rs_seq=6).snapshots == 0


def test_a_draft_model_takes_over_where_nothing_is_found():
    opened = session(PLAIN, "qwen35-b-v2x-tied-f32")
    prompts = [Prompt(prompt.tokens[::2]) for prompt in repeating(PLAIN, 2)]
    expected = tokens_of(decode(opened, prompts, RunOptions(n_predict=N)))
    options = RunOptions(n_predict=N, spec=spec_of("draft-simple", "ngram-simple", n=1))
    run = decode(opened, prompts, replace(options, parallel=2))
    assert tokens_of(run) == expected
    drafters = set(run.trace.rounds.texts("drafter"))
    assert drafters >= {"ngram-simple", "draft-simple"}


def test_every_asked_drafter_has_a_row_and_the_counters_agree():
    types = ("draft-mtp", *NGRAMS)
    run = decode(
        session(MTP),
        repeating(MTP, 3),
        RunOptions(n_predict=N, spec=spec_of(*types, m=16), parallel=3),
    )
    drafts, rounds = run.trace.drafts, run.trace.rounds
    asked = list(
        zip(
            drafts.column("round").tolist(),
            drafts.column("seq_id").tolist(),
            drafts.texts("drafter"),
            drafts.column("num_draft_tokens").tolist(),
            strict=True,
        )
    )
    assert len({row[:3] for row in asked}) == len(asked)
    winners = {(r, s): (d, n) for r, s, d, n in asked if n}
    used = zip(
        rounds.column("round").tolist(),
        rounds.column("seq_id").tolist(),
        rounds.texts("drafter"),
        rounds.column("num_draft_tokens").tolist(),
        strict=True,
    )
    assert winners == {(r, s): (d, n) for r, s, d, n in used if d}
    assert (drafts.column("num_raw") >= drafts.column("num_draft_tokens")).all()
    assert all(meaning(reason) for reason in set(drafts.texts("reason")) - {""})
    assert all(
        reason for reason, row in zip(drafts.texts("reason"), asked, strict=True) if not row[3]
    )
    assert (drafts.column("draft_ms") >= 0).all()
    accepted = rounds.column("num_accepted_draft_tokens")
    names = np.array(rounds.texts("drafter"))
    found = run.summary()["drafters"]
    assert list(found) == [name for name in DRAFTERS if name in types]
    for name, counters in found.items():
        mine = [row for row in asked if row[2] == name]
        assert counters["n_call_draft"] == len({row[0] for row in mine})
        assert counters["n_gen_drafts"] == sum(row[3] > 0 for row in mine)
        assert counters["n_gen_tokens"] == sum(row[3] for row in mine)
        assert counters["n_acc_tokens"] == accepted[names == name].sum()
        assert counters["n_acc_drafts"] == (accepted[names == name] > 0).sum()
        assert counters["n_call_accept"] == (names == name).sum()
        assert counters["n_call_begin"] == 3
    total = sum(counters["n_gen_tokens"] for counters in found.values())
    assert total == run.summary()["draft_n"]


def test_looked_up_tokens_have_no_confidence():
    run = decode(
        session(MTP), repeating(MTP, 1), RunOptions(n_predict=N, spec=spec_of("ngram-simple", n=1))
    )
    tokens = run.trace.tokens
    drafted = tokens.column("draft_index") >= 0
    assert drafted.any()
    assert np.isnan(tokens.column("draft_p")[drafted]).all()
    assert np.isnan(tokens.column("draft_top_p")[drafted]).all()


def test_drafts_are_exported_and_reopened(tmp_path):
    run = decode(
        session(MTP),
        repeating(MTP, 2),
        RunOptions(n_predict=12, spec=spec_of("draft-mtp", "ngram-map-k4v")),
    )
    export_csv(run.trace, tmp_path / "out")
    reopened = open_trace(tmp_path / "out")
    assert len(reopened.drafts) == len(run.trace.drafts)
    for name in ("match_pos", "num_raw", "num_draft_tokens"):
        assert (reopened.drafts.column(name) == run.trace.drafts.column(name)).all()
    assert reopened.drafts.texts("reason") == run.trace.drafts.texts("reason")
    assert reopened.runs[0]["summary"]["drafters"] == run.summary()["drafters"]


def test_a_lookup_cache_is_read_before_the_run(tmp_path):
    prompt, options = repeating(MTP, 1), RunOptions(n_predict=N)
    expected = tokens_of(decode(session(MTP), prompt, options))
    text = [*prompt[0].tokens, *expected[0]]
    path = tmp_path / "dynamic.bin"
    records = [[text[i], -1, -1, -1, 1, text[i + 1], 4] for i in range(len(text) - 1)]
    np.array(records, "<i4").tofile(path)
    spec = SpecOptions(types=("ngram-cache",), lookup_cache_dynamic=str(path))
    run = decode(session(MTP), prompt, replace(options, spec=spec))
    assert tokens_of(run) == expected
    without = decode(session(MTP), prompt, replace(options, spec=SpecOptions(types=spec.types)))
    assert run.summary()["draft_n"] > without.summary()["draft_n"]
    path.write_bytes(b"\1\0\0\0")
    with pytest.raises(LookupCacheError, match="ends inside a record"):
        session(MTP).start(prompt, replace(options, spec=spec))


@pytest.mark.parametrize(
    ("types", "m", "sampler"),
    [(NGRAMS, 3, GREEDY), (("ngram-mod", "draft-mtp", "draft-simple"), 48, SAMPLED)],
    ids=["greedy", "sampled"],
)
@pytest.mark.thinned(4)
def test_demo_models_say_the_same(types, m, sampler):
    opened = Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")
    code = "def add(a, b):\n    return a + b\n\n\n"
    prompts = [opened.prompt(code * n + "def add(") for n in (3, 2, 2, 2, 2)]
    options = RunOptions(n_predict=12, sampler=sampler, parallel=5)
    expected = tokens_of(decode(opened, prompts, options))
    run = decode(opened, prompts, replace(options, spec=spec_of(*types, n=3, m=m)))
    assert tokens_of(run) == expected
    assert run.summary()["draft_n_accepted"] > 0
