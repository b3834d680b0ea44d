"""The state of a grammar: forward, back and copied; and what it does to drafts."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decode.acceptance import cut_at_forbidden, reject
from engine.draft.drafter import Draft
from engine.options import SamplerOptions
from engine.sampling.distribution import Distribution
from engine.sampling.grammar import Grammar, GrammarState, GrammarTokens, is_allowed, masked
from engine.sampling.sampler import Sampler
from tests.support.chi_square import chi_square
from tests.support.golden_runs import MTP_MODELS, session

SUMS = 'start: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" start ")"\n'


def tokens() -> GrammarTokens:
    t = session(MTP_MODELS[0]).tokenizer
    return GrammarTokens(t.n_vocab, t.eog_ids, t.piece, t.encode)


def sums(rules: str = SUMS) -> Grammar:
    return Grammar(llguidance.LLMatcher.grammar_from_lark(rules), TOKENS)


TOKENS = tokens()
TOKENIZER = session(MTP_MODELS[0]).tokenizer


def ids(text: str) -> list[int]:
    """One token for each character."""
    return [TOKENIZER.ids_of_piece(character.encode())[0] for character in text]


def allowed_characters(state: GrammarState) -> set[str]:
    found = state.allowed()
    return {c for c in "0123456789+()x" if is_allowed(found, ids(c)[0])}


DIGITS = set("0123456789")


def test_what_may_come_next():
    state = sums().start()
    assert allowed_characters(state) == DIGITS | {"("}
    assert not is_allowed(state.allowed(), state.end_token)
    for token in ids("12"):
        state.accept(token)
    assert allowed_characters(state) == DIGITS | {"+"}
    assert is_allowed(state.allowed(), state.end_token)
    state.accept(ids("3")[0])
    assert allowed_characters(state) == {"+"}
    state.accept(state.end_token)
    assert allowed_characters(state) == set()
    assert (state.error, state.n_good) == ("", 4)
    state.retract()
    assert allowed_characters(state) == {"+"}
    state.accept(ids("x")[0])
    assert state.error
    assert state.n_good == 3


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["go", "go", "back", "copy"]), st.integers(0, 99))))
def test_back_and_copies_are_as_a_fresh_start(acts):
    state, text, copies = sums().start(), [], []
    for what, number in acts:
        if what == "go":
            choices = sorted(allowed_characters(state))
            text.append(ids(choices[number % len(choices)])[0])
            state.accept(text[-1])
        elif what == "back" and text:
            text.pop()
            state.retract()
        elif what == "copy":
            copies.append((state.clone(), list(text)))
    for one, tokens_of_it in [*copies, (state, text)]:
        fresh = sums().start()
        for token in tokens_of_it:
            fresh.accept(token)
        assert one.n_good == len(tokens_of_it)
        assert (one.allowed() == fresh.allowed()).all()


def test_logits_of_the_forbidden_are_minus_infinity():
    allowed = sums().start().allowed()
    logits = torch.arange(TOKENS.n_vocab + 5.0)  # a model may have more rows than tokens
    found = masked(allowed, logits)
    kept = torch.isfinite(found).nonzero()[:, 0].tolist()
    assert kept == [i for i in range(TOKENS.n_vocab) if is_allowed(allowed, i)]
    assert (found[kept] == logits[kept]).all()
    assert torch.isfinite(logits).all()
    assert not is_allowed(allowed, TOKENS.n_vocab + 100)


def test_tokens_without_text_fit_nowhere():
    state = sums("start: /.+/\n").start()
    allowed = state.allowed()
    for token in range(TOKENS.n_vocab):
        if not TOKENIZER.piece(token, special=False):
            assert not is_allowed(allowed, token)


def test_a_limit_is_an_error_and_leaves_an_end():
    limits = llguidance.LLParserLimits(step_max_items=1, max_items_in_row=1, verbose_errors=False)
    nested = 'start: a*\na: b | c\nb: "x" a? "y"\nc: "x" a? "z"\n'
    state = GrammarState.start(sums(nested).text, TOKENS, limits)
    allowed = state.allowed()
    assert "Too many items" in state.error
    assert [i for i in range(TOKENS.n_vocab) if is_allowed(allowed, i)] == TOKENS.end_tokens
    assert state.clone().error == state.error


@pytest.mark.parametrize(
    ("text", "kept", "end"),
    [("12+3", 4, False), ("12x3", 2, False), ("x", 0, False), ("1234", 3, False), ("12", 3, True)],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_draft_ends_before_what_is_forbidden(text, kept, end, drawn):
    state = sums().start()
    drafted = ids(text) + ([state.end_token, *ids("+")] if end else [])
    q = [Distribution.of_weights(np.arange(TOKENS.n_vocab), np.ones(TOKENS.n_vocab))] * len(drafted)
    draft = Draft(drafted, q=list(q) if drawn else [])
    n = len(drafted)
    cut_at_forbidden(draft, state)
    assert draft.tokens == drafted[:kept]
    assert draft.reason == ("grammar" if kept < n else "")
    assert kept == n or draft.n_raw == n
    assert state.n_good == 0, "the text itself has not gone on"
    for one in draft.q:
        assert one.probs.sum() == pytest.approx(1.0)
    if drawn and kept:
        allowed = state.allowed()
        assert all(is_allowed(allowed, token) for token in draft.q[0].ids.tolist())


@pytest.mark.parametrize("q", [(0.1, 0.2, 0.7), (0.5, 0.4, 0.1), (0.0, 0.9, 0.1)], ids=str)
@pytest.mark.thinned(4)
def test_a_cut_at_forbidden_keeps_the_target_distribution(q):
    """Where a forbidden token was drawn the target draws freely; else p/q over the allowed."""
    state = sums("start: /[abc]/\n").start()
    a, b, c, x = ids("abcx")
    p = Distribution(np.array([a, b, c]), np.array([0.6, 0.3, 0.1]))
    drafter, sampler = np.random.default_rng(3), Sampler(SamplerOptions(seed=5))
    drawn_from = Distribution(np.array([a, b, x]), np.array(q))

    def first() -> int:
        draft = Draft([drawn_from.at(drafter.random())], q=[drawn_from])
        cut_at_forbidden(draft, state)
        return reject(draft, lambda _: p, sampler, ())[0]

    outcomes = [first() for _ in range(4000)]
    assert chi_square(outcomes, {a: 0.6, b: 0.3, c: 0.1}) > 1e-3


def test_a_sampler_takes_its_grammar_along():
    options = SamplerOptions(temp=1.0, seed=3)
    sampler = Sampler(options, grammar=sums().start())
    logits = torch.zeros(8, TOKENS.n_vocab)
    before = sampler.clone()

    def texts(one: Sampler) -> list[int]:
        rows = one.rows(logits)
        return [one.draw(rows(i)) for i in range(6)]

    drawn = texts(sampler)
    assert sums().start().n_fitting(drawn) == 6
    assert texts(before.clone()) == drawn
    sampler.copy_from(before)
    assert (sampler.accepted, sampler.n_draws) == ([], 0)
    assert texts(sampler) == drawn
    assert sampler.n_astray(drawn) == 0
    assert (sampler.n_astray(drawn[:4]), sampler.n_astray([*drawn[:5], -1])) == (2, 1)
    assert set(sampler.allowed) == set(range(6))
