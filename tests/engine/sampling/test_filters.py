"""Filters against hand-made distributions; the chain test has the properties."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.filters import min_p, top_p, typical

P = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
LOGITS = np.log(P)


@pytest.mark.parametrize(("mass", "n"), [(0.01, 1), (0.39, 1), (0.45, 2), (0.69, 2), (0.75, 3)])
def test_top_p_keeps_the_most_probable(mass: float, n: int) -> None:
    assert top_p(LOGITS, mass).tolist() == [i < n for i in range(5)]


@pytest.mark.parametrize(("share", "n"), [(1.0, 1), (0.7, 2), (0.45, 3), (0.12, 4), (0.05, 5)])
def test_min_p_is_relative_to_the_best(share: float, n: int) -> None:
    assert min_p(LOGITS, share).tolist() == [i < n for i in range(5)]


def test_typical_prefers_the_expected_surprise_to_the_best_token() -> None:
    # entropy 1.35 nats; surprises 0.92, 1.20, 1.61, 2.81, 3.22: nearest is 0.3, then 0.2, 0.4
    assert typical(LOGITS, 0.2).tolist() == [False, True, False, False, False]
    assert typical(LOGITS, 0.45).tolist() == [False, True, True, False, False]
    assert typical(LOGITS, 0.6).tolist() == [True, True, True, False, False]


def test_impossible_candidates_do_no_harm() -> None:
    logits = np.array([1.0, 0.0, -np.inf])
    for keep, parameter in ((typical, 0.9), (top_p, 0.9), (min_p, 0.1)):
        kept = keep(logits, parameter)
        assert kept[0] and not kept[2]
