"""Rejection keeps the target's distribution: chi-square over a toy vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
import torch

from engine.decode import acceptance
from engine.decode.acceptance import match, reject, residual
from engine.draft.drafter import Draft
from engine.options import SamplerOptions
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Sampler
from tests.support.chi_square import chi_square

N = 10_000
SEEDS = (1, 2)
UNLIKELY = 1e-3
"""Fixed seeds make every p-value below a constant; a right rule stays above this, a wrong one
falls far below."""


def over(*probs: float) -> Distribution:
    return Distribution.of_weights(np.arange(len(probs)), np.array(probs))


P = over(0.4, 0.3, 0.2, 0.1, 0.0)
QS = {
    "equal": over(0.4, 0.3, 0.2, 0.1),
    "similar": over(0.3, 0.4, 0.15, 0.15),
    "opposite": over(0.05, 0.1, 0.25, 0.6),
    "zero where p is not": over(0.0, 0.5, 0.5, 0.0),
    "beyond p": over(0.2, 0.1, 0.1, 0.1, 0.5),
    "apart": over(0.0, 0.0, 0.0, 0.0, 1.0),
    "uniform": over(0.2, 0.2, 0.2, 0.2, 0.2),
}
PROBS = dict(enumerate(P.probs.tolist()))


def first_tokens(q: Distribution | None, seed: int, token: int = 1) -> Iterator[int]:
    """Accepted first tokens; without q the draft is `token`, with certainty."""
    sampler = Sampler(SamplerOptions(seed=seed))
    drafter = np.random.default_rng(seed + 1000)
    for _ in range(N):
        draft = Draft([token]) if q is None else Draft([q.at(drafter.random())], q=[q])
        yield reject(draft, lambda _: P, sampler, ())[0]


@pytest.mark.parametrize(("q", "seed"), list(zip(QS.values(), cycle(SEEDS))), ids=QS)
@pytest.mark.thinned(8)
def test_the_target_distribution_is_kept(q: Distribution, seed: int) -> None:
    assert chi_square(first_tokens(q, seed), PROBS) > UNLIKELY


@pytest.mark.parametrize("token", range(0, 5, 2))
def test_it_is_kept_for_certain_drafts(token: int) -> None:
    assert chi_square(first_tokens(None, 3, token), PROBS) > UNLIKELY


def wrong_residual(p: Distribution, q: Distribution) -> Distribution:
    return p


@pytest.mark.parametrize("q", ["similar", "opposite", "zero where p is not", "uniform"])
@pytest.mark.thinned(4)
def test_resampling_from_p_would_be_noticed(monkeypatch: pytest.MonkeyPatch, q: str) -> None:
    monkeypatch.setattr(acceptance, "residual", wrong_residual)
    assert chi_square(first_tokens(QS[q], 1), PROBS) < UNLIKELY**3


@pytest.mark.parametrize("claimed", ["equal", "uniform"])
def test_a_q_that_was_not_drawn_from_would_be_noticed(claimed: str) -> None:
    sampler, drafter = Sampler(SamplerOptions()), np.random.default_rng(7)

    def tokens() -> Iterator[int]:
        for _ in range(N):
            draft = Draft([QS["opposite"].at(drafter.random())], q=[QS[claimed]])
            yield reject(draft, lambda _: P, sampler, ())[0]

    assert chi_square(tokens(), PROBS) < UNLIKELY**3


@cache
def second_p(first: int) -> Distribution:
    return over(*np.roll([0.5, 0.3, 0.15, 0.05, 0.0], first))


@cache
def second_q(first: int) -> Distribution:
    return over(*np.roll([0.1, 0.3, 0.2, 0.2, 0.2], first))


@pytest.mark.parametrize(("n_drafted", "seed"), [(0, 1), (1, 1), (2, 2)])
@pytest.mark.thinned(4)
def test_two_positions_have_the_joint_distribution(n_drafted: int, seed: int) -> None:
    """The second token comes from the same draft, a bonus, or a round of its own."""
    sampler, drafter = Sampler(SamplerOptions(seed=seed)), np.random.default_rng(seed + 9)
    q = QS["similar"]

    def pair() -> tuple[int, int]:
        draft, known = Draft(), [0]
        if n_drafted:
            draft.tokens.append(q.at(drafter.random()))
            draft.q.append(q)
        if n_drafted == 2:
            draft.q.append(second_q(draft.tokens[0]))
            draft.tokens.append(draft.q[1].at(drafter.random()))

        def row(i: int) -> Distribution:
            # as in a verify batch: the second row's p depends on the first drafted token
            return P if i == 0 else second_p((draft.tokens or known)[0])

        tokens = reject(draft, row, sampler, ())
        if len(tokens) == 1:
            known[0] = tokens[0]
            again = second_q(known[0])
            next_draft = Draft([again.at(drafter.random())], q=[again])
            tokens += reject(next_draft, lambda _: second_p(known[0]), sampler, ())
        return tokens[0], tokens[1]

    joint = {(a, b): P.of(a) * second_p(a).of(b) for a, b in product(range(5), range(5))}
    assert chi_square((pair() for _ in range(N)), joint) > UNLIKELY


def test_more_is_accepted_than_by_matching() -> None:
    """sum(min(p, q)) against sum(p * q)."""
    q = QS["similar"]
    rates = []
    for rule in (reject, match):
        sampler, drafter = Sampler(SamplerOptions()), np.random.default_rng(5)
        drafts = [Draft([q.at(drafter.random())], q=[q]) for _ in range(N)]
        accepted = [len(rule(d, lambda _: P, sampler, ())) == 2 for d in drafts]
        rates.append(np.mean(accepted))
    both = range(4)
    assert rates[0] == pytest.approx(sum(min(P.of(i), q.of(i)) for i in both), abs=0.01)
    assert rates[1] == pytest.approx(sum(P.of(i) * q.of(i) for i in both), abs=0.01)


def test_residual_by_hand() -> None:
    left = residual(P, QS["similar"])
    assert left.ids.tolist() == [0, 2]
    np.testing.assert_allclose(left.probs, [2 / 3, 1 / 3])
    certain = residual(P, Distribution.certain(1))
    np.testing.assert_allclose(certain.probs, np.array([0.4, 0.2, 0.1]) / 0.7)
    assert residual(P, P) is P


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ([], [5]),
        ([5, 6, 7], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 1, 7, 8]),
        ([5, 99, 7], [5, 99, 7, 8]),
        ([5, 6, 99], [5, 6, 99, 8]),
        ([99, 6], [99, 6, 8]),
    ],
)
def test_without_chance_it_is_match(draft: list[int], target: list[int]) -> None:
    found = [
        rule(
            Draft(draft), lambda i: Distribution.certain(target[i]), Sampler(SamplerOptions()), {99}
        )
        for rule in (reject, match)
    ]
    assert found[0] == found[1]


def test_penalties_see_accepted_and_replaced_tokens() -> None:
    options = SamplerOptions(temp=0, presence_penalty=5.0)
    sampler = Sampler(options)
    logits = np.log([[0.6, 0.3, 0.1]] * 3)
    rows = sampler.rows(torch.tensor(logits))
    assert reject(Draft([0, 0]), rows, sampler, ()) == [0, 1]
    rows = sampler.rows(torch.tensor(logits))
    assert reject(Draft(), rows, sampler, ()) == [2]
