"""Drafts that are drawn: their distribution, their q, their random numbers, and p_min."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.decode.acceptance import reject
from engine.draft.drafter import Draft, DraftRequest
from engine.draft.model_drafter import ModelDrafter
from engine.options import SamplerOptions, SpecOptions
from engine.sampling.distribution import Distribution, TokenDraws, softmax
from engine.sampling.sampler import Sampler
from tests.support.chi_square import chi_square

N = 6000
LOGITS = torch.log(torch.tensor([0.02, 0.05, 0.4, 0.03, 0.3, 0.2]))


class SameLogits(ModelDrafter):
    """A model whose logits never change."""

    name = "same"

    def __init__(self, options: SpecOptions, draws: TokenDraws | None = None) -> None:
        super().__init__(SimpleNamespace(options=options, draws=draws))
        self._memory = SimpleNamespace(clear=lambda seq: None)

    def _first(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        return LOGITS.expand(len(requests), -1)

    def _next(
        self,
        requests: Sequence[DraftRequest],
        n_drafted: int,
        tokens: torch.Tensor,
        rows: Sequence[int],
    ) -> torch.Tensor:
        return LOGITS.expand(len(requests), -1)


def drafts(temp: float, n: int, *, n_max: int = 1, seed: int = 42, **spec: float) -> list[Draft]:
    options = SpecOptions(accept="rejection", n_max=n_max, **spec)
    drafter = SameLogits(options, TokenDraws(temp, seed))
    return [drafter.draft([DraftRequest(0, 5, 1, n_max)])[0] for _ in range(n)]


@pytest.mark.parametrize("temp", [0.5, 1.0, 2.0])
@pytest.mark.thinned(4)
def test_tokens_are_drawn_from_the_q_that_is_handed_over(temp: float) -> None:
    found = drafts(temp, N)
    expected = dict(enumerate(softmax(LOGITS.numpy(), temp).tolist()))
    assert chi_square((d.tokens[0] for d in found), expected) > 1e-3
    q = found[0].q[0]
    assert {t: q.of(t) for t in expected} == pytest.approx(expected, rel=1e-6)
    assert chi_square((d.tokens[0] for d in found), dict.fromkeys(expected, 1 / 6)) < 1e-9


def test_confidence_is_that_of_the_drawn_token_without_temperature() -> None:
    for draft in drafts(2.0, 20):
        assert draft.probs == pytest.approx([float(LOGITS[draft.tokens[0]].exp())], rel=1e-5)
        assert draft.top_ids[0][0] == 2


def test_at_most_ten_candidates() -> None:
    class Wide(SameLogits):
        def _first(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
            return torch.linspace(0, 1, 30).expand(len(requests), -1)

    drafter = Wide(SpecOptions(), TokenDraws(1.0, 3))
    found = [drafter.draft([DraftRequest(0, 5, 1, 1)])[0] for _ in range(200)]
    assert {d.tokens[0] for d in found} == set(range(20, 30))
    assert set(found[0].q[0].ids.tolist()) == set(range(20, 30))


def test_p_min_applies_to_the_drawn_token() -> None:
    found = drafts(1.0, 400, n_max=6, p_min=0.1)
    lengths = {len(d.tokens) for d in found}
    assert {0, 1, 6} <= lengths, "an unlikely token ends the draft, or leaves none"
    for draft in found:
        assert set(draft.tokens) <= {2, 4, 5}
        assert len(draft.q) == len(draft.tokens)
        for q in draft.q:
            assert dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True)) == pytest.approx(
                {2: 4 / 9, 4: 3 / 9, 5: 2 / 9}, rel=1e-6
            )


P = Distribution.of_weights(np.arange(6), np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]))
PROBS = dict(enumerate(P.probs.tolist()))


def emitted(found: list[Draft]) -> Iterator[int]:
    sampler = Sampler(SamplerOptions(seed=8))
    for draft in found:
        yield reject(draft, lambda _: P, sampler, ())[0]


def test_the_target_distribution_survives_p_min() -> None:
    found = drafts(1.0, 3 * N, p_min=0.25)
    assert sum(not d.tokens for d in found) > N / 2
    assert chi_square(emitted(found), PROBS) > 1e-3
    whole = Distribution(np.arange(6), softmax(LOGITS.numpy()))
    for draft in found:
        draft.q = [whole] * len(draft.tokens)
    assert chi_square(emitted(found), PROBS) < 1e-9, "q before the floor is the wrong q"


def test_random_numbers_belong_to_the_seed_and_to_the_sequence() -> None:
    tokens = [d.tokens for d in drafts(1.0, 30)]
    assert tokens == [d.tokens for d in drafts(1.0, 30)]
    assert tokens != [d.tokens for d in drafts(1.0, 30, seed=43)]
    drafter = SameLogits(SpecOptions(), TokenDraws(1.0, 42))
    beside = [drafter.draft([DraftRequest(s, 5, 1, 1) for s in (4, 0)]) for _ in range(30)]
    assert [d[0].tokens for d in beside] == [d[1].tokens for d in beside] == tokens
    drafter.forget(4)
    again = [drafter.draft([DraftRequest(4, 5, 1, 1)])[0].tokens for _ in range(30)]
    assert again == tokens


def test_they_are_not_the_samplers() -> None:
    sampler = Sampler(SamplerOptions(seed=42))
    q = Distribution(np.arange(6), softmax(LOGITS.numpy()))
    assert [[sampler.draw(q)] for _ in range(30)] != [d.tokens for d in drafts(1.0, 30)]


def test_without_draws_the_best_token_is_certain() -> None:
    draft = SameLogits(SpecOptions()).draft([DraftRequest(0, 5, 1, 3)])[0]
    assert (draft.tokens, draft.q) == ([2, 2, 2], [])
