"""Whole runs of every further family: no token changes, whatever undoes what was drafted.

Each family meets every policy, split and KV mode, greedy and sampled, alone and with others, and
each policy every mix of the others; `python -m tests.torture --only truth` draws any of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.options import DRAFTERS, KV_MODES, ROLLBACK_POLICIES, SPLITS, SamplerOptions
from tests.support.all_pairs import all_pairs
from tests.support.golden_files import second_set, with_mtp
from tests.support.golden_runs import (
    SAMPLED,
    decode,
    golden,
    options_of,
    prompt_of,
    prompts_of,
    session,
    tokens_of,
    tokens_table,
)

MODELS = second_set()
NGRAMS = [name for name in DRAFTERS if name.startswith("ngram")]
SAMPLERS = (SamplerOptions(), SAMPLED)
N = 10


@cache
def plain(name: str, sampler: SamplerOptions) -> list[list[int]]:
    options = replace(options_of(N), sampler=sampler)
    return [tokens_of(decode(session(name), [p], options))[0] for p in prompts_of(name)]


@pytest.mark.parametrize(
    ("name", "policy", "how", "sampler", "parallel"),
    all_pairs(MODELS, list(ROLLBACK_POLICIES), list(product(SPLITS, KV_MODES)), SAMPLERS, (1, 4)),
)
@pytest.mark.thinned(12)
def test_no_token_changes(name, policy, how, sampler, parallel):
    split, kv = how
    own_head = name in with_mtp(MODELS)
    opened = session(name) if own_head else session(name, name)
    prompts = prompts_of(name)[:parallel]
    options = replace(
        options_of(N, "draft-mtp" if own_head else "draft-simple"),
        sampler=sampler,
        rollback=policy,
        split=split,
        kv=kv,
        parallel=parallel,
    )
    assert tokens_of(decode(opened, prompts, options)) == plain(name, sampler)[: len(prompts)]


@pytest.mark.parametrize(
    ("name", "drafter", "policy"),
    [
        (name, NGRAMS[turn % 5], list(ROLLBACK_POLICIES)[turn % 5])
        for i, name in enumerate(MODELS)
        for turn in (2 * i, 2 * i + 1)
    ],
)
@pytest.mark.thinned(6)
def test_drafters_that_look_up(name, drafter, policy):
    options = replace(options_of(N, drafter), rollback=policy, parallel=4)
    wanted = plain(name, SamplerOptions())
    assert tokens_of(decode(session(name), prompts_of(name), options)) == wanted


# in the usual run those that test_family_faults.py leaves out
@pytest.mark.parametrize("name", [*MODELS[1:], MODELS[0]])
@pytest.mark.thinned(6)
def test_wrong_drafts_are_undone(name):
    """Drafted by another family: hardly one is right. Two policies for each family by turns."""
    other = next(one for one in MODELS if one != name)
    turn, policies = MODELS.index(name), list(ROLLBACK_POLICIES)
    for policy in (policies[turn % 5], policies[(turn + 2) % 5]):
        options = replace(options_of(N, "draft-simple", n_max=5), rollback=policy)
        run = decode(session(name, other), [prompt_of(name)], options)
        assert tokens_of(run) == [golden(name)["greedy"][:N].tolist()]
        assert run.trace.rounds.column("rollback_depth").max() > 0


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_whatever_is_drawn(data):
    """Short drafts and long ones, snapshots that reach and that do not, passes that split."""
    name = data.draw(st.sampled_from(MODELS), "model")
    drafters = [*NGRAMS, "draft-mtp"] if name in with_mtp(MODELS) else NGRAMS
    sampler = data.draw(st.sampled_from(SAMPLERS), "sampler")
    prompts = prompts_of(name)[: data.draw(st.sampled_from((1, 4)), "sequences")]
    options = replace(
        options_of(
            N, data.draw(st.sampled_from(drafters), "drafter"), n_max=data.draw(st.integers(1, 6))
        ),
        sampler=sampler,
        rollback=data.draw(st.sampled_from(list(ROLLBACK_POLICIES)), "policy"),
        split=data.draw(st.sampled_from(SPLITS), "split"),
        kv=data.draw(st.sampled_from(KV_MODES), "kv"),
        n_rs_seq=data.draw(st.none() | st.integers(0, 4), "snapshots"),
        n_ubatch=data.draw(st.sampled_from((3, 8, 512)), "pass"),
        parallel=len(prompts),
    )
    assert (
        tokens_of(decode(session(name), prompts, options)) == plain(name, sampler)[: len(prompts)]
    )


FAULTY = {
    "stale-plane": {"rollback": "planes", "n_ubatch": 3},
    "plane-off-by-one": {"rollback": "planes"},
    "no-conv-rollback": {"rollback": "planes"},
}


def a_fault(name: str, fault: str) -> str:
    """Rings go by position: one of a token more is as good."""
    return "no-conv-rollback" if name.startswith("deepseek4") else fault


@pytest.mark.parametrize(
    ("name", "fault"), [(name, a_fault(name, fault)) for name, fault in zip(MODELS, cycle(FAULTY))]
)
@pytest.mark.thinned(6)
def test_faults_change_the_output(name, fault):
    """Tokens, or where a model says the same again and again, its confidence in them."""
    other = next(one for one in MODELS if one != name)
    base = replace(options_of(20, "draft-simple", n_max=5), **FAULTY[fault])
    wrong = decode(session(name, other), [prompt_of(name)], replace(base, faults=(fault,)))
    if tokens_of(wrong) == [golden(name)["greedy"][:20].tolist()]:
        right = decode(session(name, other), [prompt_of(name)], base)
        sure = [tokens_table(run)["target_p"] for run in (right, wrong)]
        assert np.nanmax(np.abs(sure[0] - sure[1])) > 1e-3


@pytest.mark.parametrize("policy", ROLLBACK_POLICIES)
@pytest.mark.thinned(4)
def test_the_last_of_several_passes_says_how_far_back(policy):
    """Where rows go by position, how far a state serves depends on where its pass began."""
    name = "deepseek4-a-mtp-f32"
    options = replace(options_of(N, "draft-simple", n_max=5), rollback=policy, n_ubatch=3)
    run = decode(session(name, MODELS[0]), [prompt_of(name)], options)
    assert tokens_of(run) == [golden(name)["greedy"][:N].tolist()]
