"""The target's softmax as it is recorded about every examined token."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from engine.decode.recorder import TargetFacts, all_target_facts, target_facts
from kernels.rows.record import row_record


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


def test_tokens_may_be_asked_about_in_the_same_row():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * 3
    best, worst = int(logits[1].argmax()), int(logits[1].argmin())
    facts = target_facts(logits, [worst, 7, best], [1, 0, 1])
    assert facts == target_facts(logits[[1, 0, 1]], [worst, 7, best])
    assert (facts.rank[0], facts.rank[2]) == (5000, 1)


def test_equal_logits_share_a_rank():
    facts = target_facts(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0, 0.0]]), [4, 3, 6], [0, 0, 0])
    assert facts.rank == [3, 1, 6]


@pytest.mark.parametrize("n", [1, 4])
def test_many_questions_are_answered_like_single_ones(n):
    """Bit by bit: rows after the last one asked about are not looked at."""
    generator = torch.Generator().manual_seed(n)
    asked = []
    for width in range(1, n + 1):
        logits = torch.randn(width + 1, 4096, generator=generator) * 3
        logits[width] = torch.nan
        rows = [*range(width), width - 1]
        tokens = [*logits[:width].argmax(1).tolist(), 17 * width]
        asked.append((logits, None, tokens, rows))
    alone = [target_facts(one[0], *one[2:]) for one in asked]
    for values, field in zip(all_target_facts(asked), fields(TargetFacts), strict=True):
        assert values.tolist() == [x for one in alone for x in getattr(one, field.name)]


@pytest.mark.filterwarnings("error")
def test_later_rows_of_a_record_are_not_looked_at():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    alone = target_facts(logits[:2], [5, 6])
    logits[2] = torch.inf
    record = row_record(logits, 5, torch.tensor([5, 6, 7])).numpy()
    found = all_target_facts([(logits, record, [5, 6], [0, 1])])
    assert TargetFacts(*(x.tolist() for x in found)) == alone
