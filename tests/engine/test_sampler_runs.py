"""Whole runs with all samplers: speculation by matching changes no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import OptionError
from engine.options import REPLAY_MODES, SamplerOptions, SpecOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_TARGET
from tests.support import naive_sampler as naive
from tests.support.golden_runs import (
    decode,
    options_of,
    prompt_of,
    session,
    tokens_of,
    tokens_table,
)
from tests.support.sampler_runs import MTP, PAIRS, SAMPLERS, WAYS, plain, prompts_of


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize(("policy", "replay"), WAYS, ids=["-".join(way) for way in WAYS])
@pytest.mark.parametrize(("name", "draft", "drafter"), PAIRS, ids=str)
@pytest.mark.thinned(8)
def test_matching_changes_no_token(name, draft, drafter, policy, replay, sampler):
    options = replace(
        options_of(20, drafter, n_max=4),
        sampler=sampler,
        rollback=policy,
        replay=replay,
        parallel=3,
    )
    run = decode(session(name, draft), prompts_of(name), options)
    assert tokens_of(run) == plain(name, draft, sampler)
    assert len({tuple(tokens) for tokens in tokens_of(run)}) > 1


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, DEMO_DRAFT, compute="f32")


DEMO_TEXTS = ("def quicksort(arr):", "import os\n")


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.thinned(4)
def test_matching_changes_no_token_of_the_demo(demo, sampler):
    prompts = [demo.prompt(text) for text in DEMO_TEXTS]
    base = options_of(12, ignore_eos=True)
    expected = tokens_of(decode(demo, prompts, replace(base, sampler=sampler)))
    for drafter, (policy, replay) in zip(("draft-mtp", "draft-simple"), WAYS[::5], strict=True):
        options = replace(
            base,
            spec=SpecOptions((drafter,)),
            sampler=sampler,
            rollback=policy,
            replay=replay,
            parallel=2,
        )
        assert tokens_of(decode(demo, prompts, options)) == expected


def test_penalties_look_at_prompt_and_output():
    """Decoded once more, position by position, with the naive chain."""
    opened, prompt = session(MTP), prompt_of(MTP)
    options = replace(SAMPLERS["few tokens"], temp=0)
    tokens = list(prompt.tokens)
    for _ in range(16):
        row = opened.logits(tokens)[-1].tolist()
        tokens += naive.chain(row, tokens, options)
    run = decode(opened, [prompt], replace(options_of(16), sampler=options))
    assert tokens_of(run) == [tokens[len(prompt.tokens) :]]
    free = replace(options, repeat_penalty=1.0, frequency_penalty=0.0)
    assert tokens_of(decode(opened, [prompt], replace(options_of(16), sampler=free))) != tokens_of(
        run
    )


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_restore_gives_the_penalties_back(demo, temp):
    prompt = [demo.prompt("for i in range(")]
    base = options_of(20, rollback="checkpoint", ignore_eos=True)
    repeat = replace(base, sampler=SamplerOptions(temp=temp, repeat_penalty=1.3))
    expected = tokens_of(decode(demo, prompt, repeat))
    free = replace(base, sampler=SamplerOptions(temp=temp))
    assert expected != tokens_of(decode(demo, prompt, free))
    for replay in REPLAY_MODES:
        spec = SpecOptions(("draft-mtp",))
        run = decode(demo, prompt, replace(repeat, spec=spec, replay=replay))
        assert tokens_of(run) == expected
        assert run.trace.rounds.texts("rollback_path").count("restore") > 2


@pytest.mark.parametrize("replay", REPLAY_MODES)
def test_rule_p_of_match_is_the_chains(replay):
    """Greedy: the rule is certain. Sampled: the naive chain's probability of every token."""
    greedy = replace(
        options_of(30, "draft-mtp"), rollback="checkpoint", replay=replay, ignore_eos=True
    )
    table = tokens_table(decode(session(MTP), [prompt_of(MTP)], greedy))
    emitted = np.isin(table["kind"], ("target", "accepted", "bonus", "replacement"))
    assert (table["rule_p"][emitted] == 1.0).all()
    assert (table["rule_p"][table["kind"] == "rejected"] == 0.0).all()
    assert np.isnan(table["rule_q"]).all()

    opened, prompt, sampler = session(MTP), prompt_of(MTP), SAMPLERS["all"]
    run = decode(opened, [prompt], replace(greedy, sampler=sampler))
    table = tokens_table(run)
    emitted = np.isin(table["kind"], ("target", "accepted", "bonus", "replacement"))
    assert run.trace.rounds.texts("rollback_path").count("restore") > 2
    tokens = list(prompt.tokens)
    logits = opened.logits([*tokens, *tokens_of(run)[0]])
    found = table["rule_p"][emitted]
    for i, token in enumerate(tokens_of(run)[0]):
        row = logits[len(tokens) - 1]
        row[list(opened.tokenizer.eog_ids)] = -np.inf
        expected = naive.chain(row.tolist(), tokens, sampler)
        assert found[i] == pytest.approx(expected[token], rel=1e-3), i
        tokens.append(token)


def test_a_bias_outside_the_vocabulary_is_refused():
    options = replace(options_of(4), sampler=SamplerOptions(logit_bias=((10**6, 1.0),)))
    with pytest.raises(OptionError, match="Token id 1000000 is outside the vocabulary"):
        session(MTP).start([prompt_of(MTP)], options)
