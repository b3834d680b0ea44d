"""Penalties: which tokens they look at, and what they take."""

from __future__ import annotations

import pytest
import torch

from engine.options import SamplerOptions
from engine.sampling.penalties import Penalties

LOGITS = torch.tensor([3.0, -2.0, 1.0, 0.0])


def penalised(history: list[int], **options: float) -> list[float]:
    return Penalties(SamplerOptions(**options), history).apply(LOGITS).tolist()


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
    now = {token for token in range(4) if values[token] != LOGITS[token]}
    assert now == changed


def test_the_window_moves_with_accepted_tokens() -> None:
    penalties = Penalties(SamplerOptions(presence_penalty=1.0, repeat_last_n=2), [0])
    penalties.accept(1)
    penalties.accept(2)
    assert penalties.apply(LOGITS).tolist() == [3.0, -3.0, 0.0, 0.0]
    penalties.retract()
    assert penalties.apply(LOGITS).tolist() == [2.0, -3.0, 1.0, 0.0]


def test_a_copy_goes_its_own_way() -> None:
    options = SamplerOptions(presence_penalty=1.0)
    one, other = Penalties(options, [0]), Penalties(options)
    other.copy_from(one)
    one.accept(2)
    assert other.apply(LOGITS).tolist() == [2.0, -2.0, 1.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"repeat_penalty": 1.5, "repeat_last_n": 0}])
def test_penalties_without_effect_are_not_in_force(options: dict[str, float]) -> None:
    assert not Penalties(SamplerOptions(**options), [1, 2]).active


def test_logits_of_other_callers_stay_and_minus_infinity_too() -> None:
    before = LOGITS.clone()
    penalised([0], repeat_penalty=2.0)
    assert torch.equal(LOGITS, before)
    banned = torch.tensor([-torch.inf, 1.0])
    penalties = Penalties(SamplerOptions(repeat_penalty=2.0), [0])
    assert penalties.apply(banned).tolist() == [-torch.inf, 1.0]
