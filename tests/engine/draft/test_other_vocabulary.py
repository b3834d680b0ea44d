"""A draft model that lacks some of the target's tokens, or has some that the target lacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.decode.acceptance import RULES
from engine.draft.drafter import Draft
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from tests.support import naive_sampler as naive
from tests.support.chi_square import chi_square
from tests.support.golden_runs import decode, prompt_of, tokens_of
from tests.support.vocabularies import N_VOCAB, pair

NAME = "qwen35-c-v2x-mtp-f32"
SIZES = (1, 2, 7, 64, 128)
SAMPLER = SamplerOptions(temp=0.9, top_k=20, seed=5, min_p=0.0)
N = 20


def prompts(opened: Session) -> list[Prompt]:
    """One of tokens that both models know, one that alternates with tokens of the target alone."""
    tokens = prompt_of(NAME).tokens[:12]
    own = range(N_VOCAB, opened.config.n_vocab)
    mixed = [t for i, token in enumerate(tokens) for t in (token, *own[i % max(1, len(own)) :][:1])]
    return [Prompt(tokens), Prompt(tuple(mixed))]


def options(*types: str, accept: str = "match", side: str = "target") -> RunOptions:
    """The target of more tokens is made to say one of them now and then."""
    spec = SpecOptions(types, n_max=4, accept=accept)
    sampler = replace(SAMPLER, logit_bias=((N_VOCAB, 2.5),) if side == "target" else ())
    return RunOptions(n_predict=N, sampler=sampler, spec=spec, parallel=2)


def drafted(run: Run) -> np.ndarray:
    table = run.trace.tokens
    kinds = np.isin(table.texts("kind"), ("accepted", "rejected", "ignored"))
    return table.column("token_id")[kinds]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.thinned(6)
def test_no_token_changes(side, n):
    opened = pair(NAME, n, 0) if side == "target" else pair(NAME, 0, n)
    expected = tokens_of(decode(opened, prompts(opened), options(side=side)))
    run = decode(opened, prompts(opened), options("draft-simple", side=side))
    assert tokens_of(run) == expected
    assert drafted(run).size and drafted(run).max() < N_VOCAB
    said = np.concatenate(expected)
    assert (said >= N_VOCAB).any() == (side == "target") and (said < N_VOCAB).any()
    assert run.trace.rounds.column("num_accepted_draft_tokens").max() > 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_rejection_draws_from_what_both_know(side, n, monkeypatch):
    seen: list[Draft] = []

    def watched(draft, rows, sampler, end_tokens):
        seen.append(draft)
        return rule(draft, rows, sampler, end_tokens)

    rule = RULES["rejection"]
    monkeypatch.setitem(RULES, "rejection", watched)
    opened = pair(NAME, n, 0) if side == "target" else pair(NAME, 0, n)
    asked = options("draft-simple", accept="rejection", side=side)
    run = decode(opened, prompts(opened), asked)
    drafts = [draft for draft in seen if draft.tokens]
    assert drafts and drafted(run).max() < N_VOCAB
    for draft in drafts:
        for token, q in zip(draft.tokens, draft.q, strict=True):
            assert q.of(token) > 0 and q.ids.max() < N_VOCAB
            assert q.probs.sum() == pytest.approx(1)
    table = run.trace.tokens
    if side == "target":
        own = np.isin(table.texts("kind"), ("replacement", "bonus", "target"))
        assert (table.column("token_id")[own] >= N_VOCAB).any()


@pytest.mark.repeats("test_rejection_runs.py")
def test_texts_are_distributed_as_by_plain_sampling():
    opened = pair(NAME, 7, 64)
    sampler = SamplerOptions(temp=1.0, top_k=3, top_p=1.0, min_p=0.0)
    prompt = prompts(opened)[1].tokens[:4]
    expected = {(): 1.0}
    for _ in range(3):
        expected = {
            (*text, token): p * q
            for text, p in expected.items()
            for token, q in naive.chain(
                opened.logits([*prompt, *text])[-1].tolist(), [*prompt, *text], sampler
            ).items()
        }
    assert any(max(text) >= N_VOCAB for text in expected)
    run = replace(options("draft-simple", accept="rejection"), n_predict=3, n_ctx=16, parallel=1)
    found = []
    for seed in range(80):
        one = replace(run, sampler=replace(sampler, seed=seed))
        found.append(tuple(tokens_of(decode(opened, [Prompt(prompt)], one))[0]))
    assert chi_square(found, expected) > 1e-2


def test_a_token_that_the_draft_model_lacks_stops_its_next_draft_and_says_so():
    opened = pair(NAME, 64, 0)
    run = decode(opened, prompts(opened), options("draft-simple"))
    drafts, rounds = run.trace.drafts, run.trace.rounds
    reasons = np.array(drafts.texts("reason"))
    unknown = reasons == "unknown-token"
    assert unknown.any() and (drafts.column("num_draft_tokens")[unknown] == 0).all()
    # the token a round starts from is the newest one of the output before it
    told = set(
        zip(
            drafts.column("round")[unknown].tolist(),
            drafts.column("seq_id")[unknown].tolist(),
            strict=True,
        )
    )
    starts = zip(
        rounds.column("round").tolist(),
        rounds.column("seq_id").tolist(),
        rounds.column("pos0").tolist(),
        rounds.column("num_draft_tokens").tolist(),
        strict=True,
    )
    texts = [
        [*prompt.tokens, *tokens]
        for prompt, tokens in zip(prompts(opened), tokens_of(run), strict=True)
    ]
    lacking = {(r, s) for r, s, pos0, n in starts if n >= 0 and texts[s][pos0] >= N_VOCAB}
    assert told <= lacking and len(lacking - told) <= 2  # at the end nothing is asked for


def test_other_drafters_take_over_from_a_draft_model_that_lacks_the_token():
    opened = pair(NAME, 64, 0)
    expected = tokens_of(decode(opened, prompts(opened), options()))
    run = decode(opened, prompts(opened), options("draft-simple", "draft-mtp", "ngram-simple"))
    assert tokens_of(run) == expected
    asked = run.trace.drafts
    after = np.array(asked.texts("reason")) == "unknown-token"
    assert {"draft-simple"} == set(np.array(asked.texts("drafter"))[after])
    assert "draft-mtp" in run.trace.rounds.texts("drafter")
