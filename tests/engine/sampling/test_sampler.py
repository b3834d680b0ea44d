"""The sampler chain against a naive one, its filters, penalties, biases and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.options import SamplerOptions
from engine.sampling.sampler import LogitBias, Penalties, Sampler, min_p, top_p, typical
from tests.support import naive_sampler as naive

LOGITS = torch.log(torch.tensor([[0.02, 0.5, 0.08, 0.3, 0.1]]))
OFF: dict[str, Any] = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALISED = SamplerOptions(temp=0.9, repeat_penalty=1.3, frequency_penalty=0.2)


def distribution(
    options: SamplerOptions,
    logits: torch.Tensor = LOGITS,
    history: Sequence[int] = (),
    banned: Collection[int] = (),
) -> dict[int, float]:
    found = Sampler(options, banned, history).rows(logits)(0)
    return dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.02, 0.5, 0.08, 0.3, 0.1]),
        ({"top_k": 2}, [0, 0.625, 0, 0.375, 0]),
        ({"top_p": 0.85}, [0, 5 / 9, 0, 3 / 9, 1 / 9]),
        ({"min_p": 0.17}, [0, 5 / 9, 0, 3 / 9, 1 / 9]),
        ({"temp": 0.5, "top_k": 2}, [0, 25 / 34, 0, 9 / 34, 0]),
        ({"temp": 0.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_chain_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    found = distribution(SamplerOptions(**{**OFF, **settings}))
    assert [found.get(token, 0) for token in range(5)] == pytest.approx(expected)


@st.composite
def chains(draw: st.DrawFn) -> SamplerOptions:
    return SamplerOptions(
        temp=draw(st.sampled_from((0.0, 0.2, 1.0, 3.0))),
        top_k=draw(st.sampled_from((0, 1, 3, 20, 100))),
        top_p=draw(st.sampled_from((1.0, 0.9, 0.4, 0.05))),
        min_p=draw(st.sampled_from((0.0, 0.02, 0.4, 1.0))),
        typical_p=draw(st.sampled_from((1.0, 0.9, 0.5, 0.1))),
        repeat_penalty=draw(st.sampled_from((1.0, 1.3, 0.8))),
        repeat_last_n=draw(st.sampled_from((0, 1, 5, 64, -1))),
        presence_penalty=draw(st.sampled_from((0.0, 0.7, -0.7))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.3, -0.3))),
        logit_bias=draw(st.sampled_from(((), ((3, 2.5), (7, -1.5), (3, 0.5)), ((0, -1000.0),)))),
    )


@given(chains(), st.integers(0, 10**6), st.lists(st.integers(0, 39), max_size=20))
def test_chain_is_the_naive_one(options: SamplerOptions, seed: int, history: list[int]) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 2
    found = distribution(options, logits, history)
    expected = naive.chain(logits[0].tolist(), history, options)
    expected = {token: p for token, p in expected.items() if p > 0}
    assert found == pytest.approx(expected, rel=1e-4)


SWAPS = list(itertools.pairwise(naive.ORDER))


@pytest.mark.parametrize(("first", "second"), SWAPS, ids="-".join)
def test_the_order_matters_and_is_the_documented_one(first: str, second: str) -> None:
    options = SamplerOptions(
        temp=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.2,
        typical_p=0.8,
        repeat_penalty=1.5,
        presence_penalty=0.4,
        logit_bias=((1, 2.0), (2, 3.0), (5, -2.0)),
    )
    history = [1, 2, 3, 5, 8, 13]
    swapped = [{first: second, second: first}.get(name, name) for name in naive.ORDER]
    generator = torch.Generator().manual_seed(5)
    differing = 0
    for _ in range(60):
        row = torch.randn(1, 20, generator=generator) * 1.5
        found = distribution(options, row, history)
        assert found == pytest.approx(naive.chain(row[0].tolist(), history, options), rel=1e-4)
        other = dict(enumerate(row[0].tolist()))
        for name in swapped:
            other = naive.step(name, other, history, options)
        differing += found != pytest.approx(naive.probabilities(other), rel=1e-4)
    assert differing


def test_greedy_takes_the_best_after_bias_and_penalties() -> None:
    greedy = SamplerOptions(temp=0)
    assert distribution(greedy) == {1: 1.0}
    assert distribution(replace(greedy, logit_bias=((0, 9.0),))) == {0: 1.0}
    assert distribution(replace(greedy, presence_penalty=2.0), history=[1]) == {3: 1.0}
    assert distribution(replace(greedy, typical_p=0.1)) == {1: 1.0}


def test_banned_tokens_are_never_drawn() -> None:
    assert distribution(SamplerOptions(temp=0), banned=[1]) == {3: 1.0}
    assert not {1, 3} & set(distribution(SamplerOptions(**OFF), banned=[1, 3]))


@pytest.mark.parametrize(
    "options", [SamplerOptions(temp=0.9), PENALISED], ids=["plain", "penalties"]
)
def test_rows_in_one_batch_or_alone_give_the_same_tokens(options: SamplerOptions) -> None:
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))

    def together(sampler: Sampler) -> list[int]:
        found = sampler.rows(rows)
        return [sampler.draw(found(i)) for i in range(20)]

    one, other = Sampler(options, history=[4, 5]), Sampler(options, history=[4, 5])
    tokens = together(one)
    assert [other.draw(other.rows(row[None])(0)) for row in rows] == tokens
    assert together(Sampler(replace(options, seed=7), history=[4, 5])) != tokens


def test_every_draw_takes_one_random_number() -> None:
    sampler, reference = Sampler(PENALISED), np.random.Generator(np.random.PCG64(42))
    rows = sampler.rows(torch.randn(6, 50, generator=torch.Generator().manual_seed(0)))
    for row in range(6):
        expected = rows(row).at(reference.random())
        assert sampler.draw(rows(row)) == expected


def test_a_clone_keeps_random_numbers_history_and_bias() -> None:
    options = replace(PENALISED, logit_bias=((3, 4.0),))
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(2))

    def tokens(sampler: Sampler) -> list[int]:
        rows = sampler.rows(logits)
        return [sampler.draw(rows(i)) for i in range(8)]

    sampler = Sampler(options, banned=[1], history=[5, 5, 6])
    tokens(sampler)
    before = sampler.clone()
    once = tokens(sampler)
    twice = tokens(sampler)
    assert once != twice
    assert tokens(before.clone()) == once
    sampler.copy_from(before)
    assert tokens(sampler) == once


def test_rows_do_not_change_the_logits() -> None:
    logits = LOGITS.clone()
    Sampler(replace(PENALISED, logit_bias=((0, 1.0),)), [1], [2]).rows(logits)(0)
    assert torch.equal(logits, LOGITS)


P = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
LEFT = np.log(P)


@pytest.mark.parametrize(("mass", "n"), [(0.01, 1), (0.39, 1), (0.45, 2), (0.69, 2), (0.75, 3)])
def test_top_p_keeps_the_most_probable(mass: float, n: int) -> None:
    assert top_p(LEFT, mass).tolist() == [i < n for i in range(5)]


@pytest.mark.parametrize(("share", "n"), [(1.0, 1), (0.7, 2), (0.45, 3), (0.12, 4), (0.05, 5)])
def test_min_p_is_relative_to_the_best(share: float, n: int) -> None:
    assert min_p(LEFT, share).tolist() == [i < n for i in range(5)]


def test_typical_prefers_the_expected_surprise_to_the_best_token() -> None:
    # entropy 1.35 nats; surprises 0.92, 1.20, 1.61, 2.81, 3.22: nearest is 0.3, then 0.2, 0.4
    assert typical(LEFT, 0.2).tolist() == [False, True, False, False, False]
    assert typical(LEFT, 0.45).tolist() == [False, True, True, False, False]
    assert typical(LEFT, 0.6).tolist() == [True, True, True, False, False]


def test_impossible_candidates_do_no_harm() -> None:
    logits = np.array([1.0, 0.0, -np.inf])
    for keep, parameter in ((typical, 0.9), (top_p, 0.9), (min_p, 0.1)):
        kept = keep(logits, parameter)
        assert kept[0] and not kept[2]


BIASED = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]])


def test_biases_of_a_token_add_up_in_every_row() -> None:
    biased = LogitBias([(1, 0.5), (2, -4.0), (1, 1.0)]).apply(BIASED)
    assert biased.tolist() == [[1.0, 3.5, -1.0], [0.0, 0.5, 1.0]]
    assert BIASED[0].tolist() == [1.0, 2.0, 3.0]


def test_a_banned_token_has_no_way_back() -> None:
    biased = LogitBias([(2, 100.0)], banned=[2]).apply(BIASED)
    assert biased[:, 2].tolist() == [-torch.inf] * 2


def test_nothing_to_do_costs_nothing() -> None:
    assert LogitBias([]).apply(BIASED) is BIASED


SCORES = torch.tensor([3.0, -2.0, 1.0, 0.0])


def penalised(history: list[int], **options: float) -> list[float]:
    return Penalties(SamplerOptions(**options), history).apply(SCORES).tolist()


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert penalised([0, 1, 1, 3], repeat_penalty=2.0) == [1.5, -4.0, 1.0, 0.0]


def test_presence_counts_once_and_frequency_every_time() -> None:
    assert penalised([0, 1, 1], presence_penalty=0.5) == [2.5, -2.5, 1.0, 0.0]
    assert penalised([0, 1, 1], frequency_penalty=0.5) == [2.5, -3.0, 1.0, 0.0]
    both = penalised([0, 1, 1], repeat_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    assert both == [0.0, -6.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("last_n", "changed"), [(1, {2}), (2, {2, 3}), (3, {0, 2, 3}), (9, {0, 2, 3}), (-1, {0, 2, 3})]
)
def test_only_the_newest_tokens_count(last_n: int, changed: set[int]) -> None:
    values = penalised([0, 3, 2], presence_penalty=1.0, repeat_last_n=last_n)
    now = {token for token in range(4) if values[token] != SCORES[token]}
    assert now == changed


def test_the_window_moves_with_accepted_tokens() -> None:
    penalties = Penalties(SamplerOptions(presence_penalty=1.0, repeat_last_n=2), [0])
    penalties.accept(1)
    penalties.accept(2)
    assert penalties.apply(SCORES).tolist() == [3.0, -3.0, 0.0, 0.0]
    penalties.retract()
    assert penalties.apply(SCORES).tolist() == [2.0, -3.0, 1.0, 0.0]


def test_a_copy_goes_its_own_way() -> None:
    options = SamplerOptions(presence_penalty=1.0)
    one, other = Penalties(options, [0]), Penalties(options)
    other.copy_from(one)
    one.accept(2)
    assert other.apply(SCORES).tolist() == [2.0, -2.0, 1.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"repeat_penalty": 1.5, "repeat_last_n": 0}])
def test_penalties_without_effect_are_not_in_force(options: dict[str, float]) -> None:
    assert not Penalties(SamplerOptions(**options), [1, 2]).active


def test_logits_of_other_callers_stay_and_minus_infinity_too() -> None:
    before = SCORES.clone()
    penalised([0], repeat_penalty=2.0)
    assert torch.equal(SCORES, before)
    banned = torch.tensor([-torch.inf, 1.0])
    penalties = Penalties(SamplerOptions(repeat_penalty=2.0), [0])
    assert penalties.apply(banned).tolist() == [-torch.inf, 1.0]
