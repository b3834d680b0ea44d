"""The sampler chain against hand-made distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decode.sampler import Sampler
from engine.options import SamplerOptions

LOGITS = torch.log(torch.tensor([[0.02, 0.5, 0.08, 0.3, 0.1]]))
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def frequencies(options: SamplerOptions, banned=(), n: int = 4000) -> np.ndarray:
    sampler = Sampler(options, banned)
    candidates = sampler.candidates(LOGITS)
    return np.bincount([sampler.pick(candidates, 0) for _ in range(n)], minlength=5) / n


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temp": 1.0, **OFF}, [0.02, 0.5, 0.08, 0.3, 0.1]),
        ({"temp": 1.0, **OFF, "top_k": 2}, [0, 0.625, 0, 0.375, 0]),
        ({"temp": 1.0, **OFF, "top_p": 0.85}, [0, 5 / 9, 0, 3 / 9, 1 / 9]),
        ({"temp": 1.0, **OFF, "min_p": 0.17}, [0, 5 / 9, 0, 3 / 9, 1 / 9]),
        ({"temp": 0.5, **OFF, "top_k": 2}, [0, 25 / 34, 0, 9 / 34, 0]),
        ({"temp": 0.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_chain(settings, expected):
    np.testing.assert_allclose(frequencies(SamplerOptions(**settings)), expected, atol=0.03)


def test_banned_tokens_are_never_drawn():
    assert frequencies(SamplerOptions(temp=0), banned=[1]).argmax() == 3
    assert frequencies(SamplerOptions(temp=1.0, **OFF), banned=[1, 3])[[1, 3]].sum() == 0


def test_seed_decides_the_draws_and_every_pick_draws_once():
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    one, other = Sampler(SamplerOptions(temp=0.9)), Sampler(SamplerOptions(temp=0.9))
    together = one.candidates(rows)
    singly = [other.pick(other.candidates(row[None]), 0) for row in rows]
    assert [one.pick(together, i) for i in range(20)] == singly
    reseeded = Sampler(SamplerOptions(temp=0.9, seed=7))
    assert [reseeded.pick(together, i) for i in range(20)] != singly


def test_candidates_do_not_change_the_logits():
    logits = LOGITS.clone()
    Sampler(SamplerOptions(temp=0), banned=[1]).candidates(logits)
    assert torch.equal(logits, LOGITS)
