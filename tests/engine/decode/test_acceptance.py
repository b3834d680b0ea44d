"""Acceptance: what sampling every position keeps, and what a judge writes into a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decode.acceptance import Judge, match
from engine.decode.round import Round
from engine.draft.drafter import Draft
from engine.options import RunOptions, SamplerOptions, SpecOptions
from engine.sampling.distribution import Distribution
from engine.sampling.sampler import Sampler

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

    accepted_list = match(Draft(draft), row, Sampler(SamplerOptions()), END)
    assert accepted_list == accepted
    assert asked == list(range(examined))


LOGITS = torch.log(torch.tensor([[0.999, 0.001], [0.999, 0.001], [0.5, 0.5]]))


def judged(draft: Draft, *faults: str, accept: str = "match", seed: int = 42) -> Round:
    """A round of draft tokens 0 and 1, of which the first two rows want the first."""
    sampler = Sampler(SamplerOptions(temp=1.0, top_p=1.0, min_p=0.0, seed=seed))
    options = RunOptions(spec=SpecOptions(accept=accept), faults=faults)
    round_ = Round(0, 0, 0, 0, [0, *draft.tokens], draft, logits=LOGITS)
    Judge([sampler], options, ()).accept(round_)
    return round_


def test_a_round_says_what_it_was_judged_by() -> None:
    found = judged(Draft([0, 1]))
    assert (found.accepted, found.n_accepted, found.own_kinds) == ([0, 0], 1, ["replacement"])
    assert found.rule_p == pytest.approx([0.999, 0.001, 0.999])
    assert found.examined == ([0, 1, 0], [0, 1, 1])
    assert found.rule_q == ()


def test_rejection_says_what_the_drafter_believed() -> None:
    q = [Distribution(np.array([0, 1]), np.array([0.25, 0.75]))] * 2
    found = judged(Draft([0, 1], q=q), accept="rejection")
    assert (found.accepted, found.own_kinds) == ([0, 0], ["replacement"])
    assert found.rule_p == pytest.approx([0.999, 0.001, 0.999])
    assert found.rule_q == [0.25, 0.75]
    assert judged(Draft([0, 1]), accept="rejection").rule_q == [1.0, 1.0], "certain of its tokens"


def test_a_stale_row_is_named_and_its_probability_kept() -> None:
    seeds = [judged(Draft([0, 1]), "stale-logits", seed=seed) for seed in range(20)]
    assert {found.accepted[1] for found in seeds} == {0, 1}
    for found in seeds:
        assert (found.own_row, found.n_accepted) == (2, 1)
        assert found.rule_p == pytest.approx([0.999, 0.001, 0.5])
        torch.testing.assert_close(found.rows, LOGITS[[0, 2]])


def test_a_replay_that_agrees_adds_a_token_and_judges_the_draft() -> None:
    sampler = Sampler(SamplerOptions(temp=1.0, top_p=1.0, min_p=0.0))
    judge = Judge([sampler], RunOptions(replay="verify"), ())
    round_ = Round(0, 0, 0, 0, [0, 0, 1], Draft([0, 1]), logits=LOGITS)
    judge.accept(round_)
    assert (round_.accepted, round_.n_kept) == ([0, 0], 2)
    judge.accept_again(round_)
    assert (round_.accepted[:2], round_.n_own, round_.n_kept) == ([0, 0], 2, 2)
    assert round_.own_kinds == ["replacement", "bonus"]
    assert round_.examined == ([0, 1, *round_.accepted[1:]], [0, 1, 1, 2])
    assert round_.rule_p == pytest.approx([0.999, 0.001, 0.999, 0.5])
    assert sampler.accepted == round_.accepted and sampler.n_draws == 3
