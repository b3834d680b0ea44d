"""Whole runs with drafters of blocks: no token changes, whatever is drafted or undone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experiments.random_models.random_model import write_random_drafter, write_random_model
from engine.options import (
    KV_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    CacheOptions,
    Prompt,
    RunOptions,
    SamplerOptions,
    SpecOptions,
)
from engine.session import Session
from tests.support.all_texts import texts, written
from tests.support.cached_runs import OpenCache, decode_cached
from tests.support.chi_square import chi_square
from tests.support.golden_drafters import TARGETS, drafter_file, drafters
from tests.support.golden_files import golden_file
from tests.support.golden_runs import SAMPLED, decode, prompt_of, tokens_of

FAMILY = [*drafters("dflash"), *drafters("dspark")]
HERE = pytest.mark.skipif(not FAMILY, reason="the golden drafters are not there")
SAMPLERS = (SamplerOptions(), SAMPLED)
N = 12


@cache
def opened(name: str) -> Session:
    target = golden_file(f"{TARGETS[name]}.gguf")
    return Session.open(target, drafter_file(f"{name}.gguf"), compute="f32")


def prompts_of(name: str) -> list[Prompt]:
    tokens = prompt_of(TARGETS[name]).tokens
    return [Prompt(tokens[:n] + tokens[: n // 2]) for n in (20, 7, 24, 4)]


@cache
def plain(name: str, sampler: SamplerOptions) -> list[list[int]]:
    options = RunOptions(n_predict=N, sampler=sampler)
    return [tokens_of(decode(opened(name), [p], options))[0] for p in prompts_of(name)]


def options_for(name: str, *others: str, **kwargs) -> RunOptions:
    (drafter,) = opened(name).drafts
    spec = SpecOptions(types=(*others, drafter), n_max=4)
    return RunOptions(n_predict=N, spec=spec, **kwargs)


@HERE
@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(FAMILY or [""]),
    st.sampled_from(list(ROLLBACK_POLICIES)),
    st.sampled_from(list(SPLITS)),
    st.sampled_from(list(KV_MODES)),
    st.sampled_from((1, 4)),
    st.sampled_from(SAMPLERS),
    st.booleans(),
    st.sampled_from((8, 512)),
)
def test_no_token_changes(name, policy, split, kv, parallel, sampler, chained, n_ubatch):
    options = options_for(
        name,
        *(("ngram-mod", "ngram-simple") if chained else ()),
        rollback=policy,
        split=split,
        kv=kv,
        parallel=parallel,
        sampler=sampler,
        n_ubatch=n_ubatch,
    )
    prompts = prompts_of(name)[:parallel]
    assert tokens_of(decode(opened(name), prompts, options)) == plain(name, sampler)[: len(prompts)]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.thinned(4)
def test_a_prompt_that_goes_on_from_the_cache_drafts_the_same(name):
    """Cut in the middle of what was decoded, and from a context checkpoint."""
    first, *_ = prompts_of(name)
    cache_ = OpenCache(CacheOptions(ctx_checkpoints=4))
    options = options_for(name, n_ubatch=8)
    run, _ = decode_cached(opened(name), [first], options, cache_)
    longer = Prompt(first.tokens + tuple(tokens_of(run)[0][:3]) + first.tokens[:5])
    other = Prompt(first.tokens[:18] + first.tokens[5:12])
    for prompt in (longer, other):
        cached, _ = decode_cached(opened(name), [prompt], options, cache_)
        alone, _ = decode_cached(opened(name), [prompt], options, None)
        assert tokens_of(cached) == tokens_of(alone)
        assert judged(cached) == judged(alone)


def judged(run):
    """Drafted and accepted tokens of every round with a draft."""
    columns = ("num_draft_tokens", "num_accepted_draft_tokens")
    rounds = zip(*(run.trace.rounds.column(name).tolist() for name in columns), strict=True)
    return [one for one in rounds if one[0] >= 0]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_passes_are_recorded_and_blocks_stay_as_they_are(tmp_path, kind):
    """In blocks of a quantised file, where every product is a kernel."""
    write_random_model(tmp_path / "t.gguf", size="tiny")
    write_random_drafter(tmp_path / "d.gguf", drafter=kind, size="tiny")
    session = Session.open(tmp_path / "t.gguf", tmp_path / "d.gguf", compute="blocks")
    (drafter,) = session.drafts
    spec = SpecOptions(types=(drafter,), n_max=4)
    options = RunOptions(n_predict=16, spec=spec, ignore_eos=True)
    prompt = Prompt(tuple(range(40, 70)))
    expected = tokens_of(decode(session, [prompt], replace(options, spec=SpecOptions())))
    (made,) = session.make_drafters(options, 1, 256)

    with patch.object(Session, "make_drafters", lambda *_: [made]):
        assert tokens_of(decode(session, [prompt], options)) == expected
    graphs = made._memory._graphs
    assert graphs._record is not None, "recording a pass failed"
    assert len(graphs._graphs) >= 2


@HERE
@pytest.mark.repeats("test_rejection_runs.py")
def test_texts_are_distributed_as_by_plain_sampling():
    found, drafted, accepted = written(opened("dspark-a-anchor"), 150, "draft-dspark")
    assert 0.05 < accepted / drafted < 0.95
    assert chi_square(found, texts()) > 1e-2
