"""Acceptance, and the facts recorded about every examined token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decode.distribution import Distribution
from engine.decode.sampler import Sampler
from engine.decode.verify import match, target_facts
from engine.draft.drafter import Draft
from engine.options import SamplerOptions

END = {99}


@pytest.mark.parametrize(
    ("draft", "target", "accepted", "examined"),
    [
        ([], [5], [5], 1),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 1, 7, 8], [5, 1], 2),
        ([5, 6, 7], [1, 6, 7, 8], [1], 1),
        ([5, 99, 7], [5, 99, 7, 8], [5, 99], 2),
        ([5, 6, 99], [5, 6, 99, 8], [5, 6, 99, 8], 4),
    ],
)
def test_match(draft, target, accepted, examined):
    asked = []

    def row(i: int) -> Distribution:
        asked.append(i)
        return Distribution.certain(target[i])

    found = match(Draft(draft), row, Sampler(SamplerOptions()), END)
    assert found.tokens == accepted
    assert asked == list(range(examined))


def test_match_says_what_it_went_by():
    """Token 6 is drawn at both positions with the first random numbers of the seed."""
    p = Distribution(np.array([6, 7]), np.array([0.999, 0.001]))
    found = match(Draft([6, 7]), lambda _: p, Sampler(SamplerOptions()), END)
    assert found.tokens == [6, 6]
    assert found.judged_p == [0.999, 0.001]
    assert np.isnan(found.judged_q).all() and len(found.judged_q) == 2
    assert found.own_p == 0.999


def test_target_facts_against_numpy():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)) * 3
    facts = target_facts(logits, [4, 17, 30])
    p = np.exp(logits.numpy().astype(np.float64))
    p /= p.sum(1, keepdims=True)
    for row, token in enumerate([4, 17, 30]):
        assert facts.prob[row] == pytest.approx(p[row, token], rel=1e-5)
        assert facts.rank[row] == 1 + (p[row] > p[row, token]).sum()
        assert facts.entropy[row] == pytest.approx(-(p[row] * np.log(p[row])).sum(), rel=1e-5)
        order = np.argsort(-p[row])[:5]
        assert facts.top_ids[row] == order.tolist()
        np.testing.assert_allclose(facts.top_probs[row], p[row, order], rtol=1e-5)


def test_impossible_tokens_do_not_poison_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    facts = target_facts(logits, [2])
    assert facts.entropy[0] == pytest.approx(np.log(2))
    assert facts.prob[0] == 0.0
