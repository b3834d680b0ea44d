"""What a run does for the first time: counted in a loop, and left out of what things cost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.analysis.what_if.recorded import SEEN, RoundCosts, are_first
from tests.support.recorded_rounds import recorded


@given(st.lists(st.integers(-3, 3)))
def test_occurrences_are_counted(keys: list[int]) -> None:
    seen: Counter[int] = Counter()
    expected = []
    for key in keys:
        expected.append(seen[key] < SEEN)
        seen[key] += 1
    assert are_first(np.array(keys, np.int64)).tolist() == expected


def test_the_first_passes_of_a_width_do_not_count() -> None:
    wide = [(2, 1, ms) for ms in (35.0, 50.0, 30.0, 30.0, 30.0, 30.0)]
    narrow = [(0, 0, ms) for ms in (15.0, 30.0, 10.0, 10.0, 10.0, 10.0)]
    rounds = recorded([*wide, *narrow])
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    assert costs.verify(np.array([1, 3])).tolist() == [10.0, 30.0]
    # in a run that another one like it went before, they are passes like others
    costs = RoundCosts.measured(rounds.repeated())
    assert costs is not None
    assert costs.verify(np.array([1, 3])).tolist() == pytest.approx([85 / 6, 205 / 6])


def test_a_drafters_first_readings_do_not_count() -> None:
    rounds = recorded([(2, 1, 30.0)] * 7, draft_ms=2.0)
    # after the first draft of the text, the drafter reads two tokens, in a pass as yet unknown
    rounds.phases["draft"][1:3] += [7.0, 9.0]
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    assert costs.draft(np.array([2])).tolist() == [4.0]
    costs = RoundCosts.measured(rounds.repeated())
    assert costs is not None
    assert costs.draft(np.array([2])).tolist() == pytest.approx([4.0 + 16 / 6])
