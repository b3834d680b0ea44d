"""The range of a gain between two settings: of what a run's quarters cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.surface import gain
from tests.support.confident_trace import confident_trace


def test_the_range_of_a_gain_is_that_of_quarters_of_the_run() -> None:
    rounds = RecordedRounds.of(confident_trace(60))
    long, short = {"n_max": 4, "p_min": 0.0}, {"n_max": 1, "p_min": 0.0}
    assert gain(rounds, long, long) == (1.0, 1.0)
    usual = gain(rounds, long, short)
    assert usual is not None and 0 < usual[0] <= usual[1]
    slow = np.arange(len(rounds)) < len(rounds) // 4
    draft = np.where(slow, 1000.0, 0.0) * rounds.steps
    verify = np.full(len(rounds), 1.0)
    uneven = replace(rounds, phases={**rounds.phases, "draft": draft, "verify": verify})
    low, high = gain(uneven, long, short) or (0.0, 0.0)
    assert low < 1 < high, "in one quarter drafting longer costs more than it brings"
    assert gain(rounds.where(np.arange(len(rounds)) < 20), long, short) is None
    untimed = {name: np.full(len(rounds), np.nan) for name in rounds.phases}
    assert gain(replace(rounds, phases=untimed), long, short) is None
    assert gain(rounds, short, long) is None, "no pass of two tokens was timed"
