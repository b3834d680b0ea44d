"""What a run does for the first time: counted in a loop, and paid as often as it would be met."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.what_if.costs import RoundCosts
from engine.trace.what_if.first_times import occurrences
from engine.trace.what_if.rules import FIXED
from engine.trace.what_if.simulation import simulate
from tests.support.recorded_rounds import recorded


@given(st.lists(st.integers(-3, 3)))
def test_occurrences_are_counted(keys: list[int]) -> None:
    seen: Counter[int] = Counter()
    expected = []
    for key in keys:
        expected.append(seen[key])
        seen[key] += 1
    assert occurrences(np.array(keys, np.int64)).tolist() == expected


def test_new_widths_are_paid_for_once_a_run() -> None:
    # of width 3 the first two passes take longer, of width 1 too, by as much
    wide = [(2, 1, ms) for ms in (35.0, 50.0, 30.0, 30.0, 30.0, 30.0)]
    narrow = [(0, 0, ms) for ms in (15.0, 30.0, 10.0, 10.0, 10.0, 10.0)]
    rounds = recorded([*wide, *narrow], draft_ms=0.0)
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    assert costs.first.passes.tolist() == [5.0, 20.0]
    assert costs.verify(np.array([1, 3])).tolist() == [10.0, 30.0]
    played = simulate(rounds, costs, FIXED, [{"n_max": 2}, {"n_max": 0}])
    assert played.verify_ms[0].sum() == pytest.approx(rounds.phases["verify"].sum())
    # plain decoding has one width
    assert played.verify_ms[1].sum() == pytest.approx(18 * 10 + 25)


def test_a_drafters_first_readings_are_paid_for() -> None:
    rounds = recorded([(2, 1, 30.0)] * 6, draft_ms=2.0)
    # behind the first draft of the text, the drafter reads two tokens, in a pass as yet unknown
    rounds.phases["draft"][1:3] += [7.0, 9.0]
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    played = simulate(rounds, costs, FIXED, [{"n_max": 2}])
    assert played.draft_ms.sum() == pytest.approx(6 * 4 + 7 + 9)
