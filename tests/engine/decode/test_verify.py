"""Acceptance, and the facts recorded about every examined token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decode.verify import accept, target_facts

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
def test_accept(draft, target, accepted, examined):
    asked = []

    def pick(i: int) -> int:
        asked.append(i)
        return target[i]

    assert accept(draft, pick, END) == accepted
    assert asked == list(range(examined))


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
