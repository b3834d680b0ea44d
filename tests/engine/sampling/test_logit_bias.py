"""Logit bias adds up, and bans win."""

from __future__ import annotations

import torch

from engine.sampling.penalties import LogitBias

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]])


def test_biases_of_a_token_add_up_in_every_row() -> None:
    biased = LogitBias([(1, 0.5), (2, -4.0), (1, 1.0)]).apply(LOGITS)
    assert biased.tolist() == [[1.0, 3.5, -1.0], [0.0, 0.5, 1.0]]
    assert LOGITS[0].tolist() == [1.0, 2.0, 3.0]


def test_a_banned_token_has_no_way_back() -> None:
    biased = LogitBias([(2, 100.0)], banned=[2]).apply(LOGITS)
    assert biased[:, 2].tolist() == [-torch.inf] * 2


def test_nothing_to_do_costs_nothing() -> None:
    assert LogitBias([]).apply(LOGITS) is LOGITS
