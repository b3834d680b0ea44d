"""What drafting costs: at once and step by step, after a prompt and after a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.analysis.what_if.recorded import CostCurve, RoundCosts
from engine.analysis.what_if.rules import FIXED
from engine.analysis.what_if.surface import simulate
from tests.support.recorded_rounds import recorded

AT_ONCE = CostCurve.of_points({0: 0.0, 4: 4.0})
BY_STEP = CostCurve.of_points({0: 0.0, 4: 12.0})
COSTS = replace(RoundCosts.free(), draft=AT_ONCE, draft_by_step=BY_STEP, reading_ms=100.0)


def test_reading_the_prompt_stands_by_itself() -> None:
    rounds = recorded([(2, 1, 30.0)] * 6, draft_ms=2.0)
    rounds.phases["draft"][0] += 50.0
    costs = RoundCosts.measured(rounds.repeated())
    assert costs is not None
    assert (costs.draft(np.array([2]))[0], costs.reading_ms) == (4.0, 50.0)
    played = simulate(rounds, costs, FIXED, [{"n_max": 2}, {"n_max": 0}])
    assert played.draft_ms[:, 0].tolist() == [6 * 4.0 + 50.0, 0.0]


def test_drafts_that_the_limit_cuts_do_not_tell_what_others_cost() -> None:
    rounds = recorded([(4, 1, 30.0)] * 6 + [(2, 2, 30.0)] * 4, draft_ms=2.0)
    rounds.phases["draft"][6:] *= 9.0
    rounds = replace(rounds.repeated(), was_cut=rounds.drafted < 4)
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    # in proportion to its steps
    assert costs.draft(np.array([2, 4])).tolist() == [4.0, 8.0]


@pytest.mark.parametrize(
    ("n_max", "p_min", "at_limit", "expected"),
    [
        # after the prompt every drafter goes step by step
        (4, 0.0, False, 100.0 + 12.0 + 4.0 + 4.0),
        (4, 0.5, False, 100.0 + 3 * 12.0),
        (2, 0.0, False, 100.0 + 6.0 + 4 * 2.0),
        # ten tokens: the third draft of four has room for one
        (4, 0.0, True, 100.0 + 12.0 + 4.0 + 3.0),
        (0, 0.0, True, 0.0),
    ],
)
def test_a_draft_is_made_at_once_unless_something_is_in_the_way(
    n_max: int, p_min: float, at_limit: bool, expected: float
) -> None:
    rounds = recorded([(4, 3, 30.0), (4, 3, 30.0), (4, 1, 30.0)], confidence=[[0.9] * 4] * 3)
    rounds = replace(rounds, ends_at_limit=np.array([at_limit]))
    played = simulate(rounds, COSTS, FIXED, [{"n_max": n_max, "p_min": p_min}])
    assert played.draft_ms.sum() == pytest.approx(expected)
