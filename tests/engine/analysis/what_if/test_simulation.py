"""The simulator against counts by hand, a walk in plain Python, and the run it is made from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.what_if.recorded import CostCurve, RecordedRounds, RoundCosts
from engine.analysis.what_if.rules import FIXED, RULES, cut_lengths, floors_at
from engine.analysis.what_if.surface import simulate, surface, what_if
from engine.trace.run_ref import RunRef
from tests.support.recorded_rounds import recorded
from tests.support.timed_trace import timed_trace


def test_one_text_by_hand() -> None:
    # right: two of two, none of three, and a round without a draft
    rounds = recorded([(2, 2, 30.0), (3, 0, 40.0), (0, 0, 10.0)])
    costs = RoundCosts.measured(rounds)
    played = simulate(rounds, costs, FIXED, [{"n_max": 0}, {"n_max": 1}, {"n_max": 2}])
    assert played.tokens[:, 0].tolist() == [5, 5, 5]
    assert played.rounds[:, 0].tolist() == [5, 4, 3]
    # with n_max 1: a right one, then the draft has run out, then a wrong one
    assert played.accepted[:, 0].tolist() == [0, 1, 2]
    assert played.drafted[:, 0].tolist() == [0, 2, 4]
    assert played.draft_ms[:, 0].tolist() == [0.0, 4.0, 8.0]
    assert played.verify_ms[:, 0].tolist() == [50.0, 60.0, 70.0]
    assert played.tokens_per_second()[2] == pytest.approx(1e3 * 5 / 78)


def test_undone_drafts_are_paid_for_where_they_would_be_undone() -> None:
    rounds = recorded([(2, 1, 30.0), (2, 2, 30.0)], restore_ms=8.0)
    result = what_if(rounds)
    assert result is not None
    rests = [e.rest_ms for e in result.estimates]
    assert rests[0] == 0.0 and rests[2] == pytest.approx(4.0)


def test_widths_that_were_not_measured_lie_between_their_neighbours() -> None:
    rounds = recorded([(3, 3, 40.0), (1, 1, 20.0)])
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    assert costs.verify(np.array([1, 2, 3, 4, 9])).tolist() == [20.0, 20.0, 30.0, 40.0, 40.0]
    result = what_if(rounds)
    assert result is not None
    assert result.unmeasured_widths == (1, 3)


def test_the_recorded_length_gives_the_recorded_speed() -> None:
    store, _, run_id = timed_trace(200)
    rounds = RecordedRounds.of(RunRef(store, run_id))
    result = what_if(rounds)
    assert result is not None and rounds.n_max == 4
    total = sum(float(np.nansum(ms)) for ms in rounds.phases.values())
    emitted = int(rounds.emitted.sum())
    assert result.recorded.tokens_per_second == pytest.approx(1e3 * emitted / total, rel=0.005)


def test_an_untimed_run_has_lengths_only() -> None:
    result = what_if(recorded([(2, 1, float("nan"))]))
    assert result is not None
    assert result.best is None
    assert [e.expected_length for e in result.estimates] == [1.0, 2.0, 2.0]
    assert result.recorded.step_ms is None


def test_without_a_step_there_is_no_estimate() -> None:
    assert what_if(recorded([(0, 0, 10.0)])) is None
    assert surface(recorded([(0, 0, 10.0)])) is None


ROUNDS = st.lists(
    st.integers(0, 5).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(ROUNDS, st.integers(0, 5), st.integers(0, 3), st.floats(0.0, 1.0), st.randoms())
def test_fixed_lengths_are_a_walk_through_the_text(pairs, n_max, n_min, p_min, random) -> None:
    """Shorter drafts than recorded, at every place what is left of the recorded draft."""
    sure = [[random.random() for _ in range(drafted)] for drafted, _ in pairs]
    rounds = recorded([(d, a, 10.0 + d) for d, a in pairs], confidence=sure)
    n_max = min(n_max, rounds.n_max)
    places = []
    for (drafted, right), own in zip(pairs, sure, strict=True):
        places += [(drafted - i, right - i, own[i:], drafted) for i in range(right + 1)]
    at = n_rounds = n_drafted = n_accepted = 0
    while at < len(places):
        rest, right, own, drafted = places[at]
        full = drafted == rounds.n_max  # it would have gone on; what that brings is left to chance
        if full and rest < n_max:
            return
        length = min(rest, n_max)
        below = next((i for i, p in enumerate(own[:length]) if p < p_min), length)
        length = below if below >= n_min else 0
        n_rounds, n_drafted = n_rounds + 1, n_drafted + length
        n_accepted += min(right, length)
        at += min(right, length) + 1
    setting = {"n_max": n_max, "n_min": n_min, "p_min": p_min}
    played = simulate(rounds, RoundCosts.measured(rounds), FIXED, [setting])
    assert played.rounds.sum() == n_rounds
    assert played.drafted.sum() == n_drafted
    assert played.accepted.sum() == n_accepted


def test_a_token_below_the_floor_was_drafted_all_the_same() -> None:
    below = floors_at(np.array([[0.9, 0.4, 0.8], [0.9, 0.9, np.nan]]), np.array([0.5, 0.95]))
    assert below.tolist() == [[1, 3], [0, 0]]
    verified, steps = cut_lengths(np.array([3, 3]), below[0], np.array([9, 9]), 3, 2)
    assert verified.tolist() == [0, 3]  # one token is less than n_min
    assert steps.tolist() == [2, 3]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_plays_all_of_the_text(rule) -> None:
    store, _, run_id = timed_trace(150)
    rounds = RecordedRounds.of(RunRef(store, run_id))
    chosen = rule.settings(rounds.n_max)
    played = simulate(rounds, RoundCosts.measured(rounds), rule, chosen)
    assert (played.tokens.sum(1) == rounds.emitted.sum()).all()
    assert (played.rounds.sum(1) + played.accepted.sum(1) >= played.tokens.sum(1)).all()
    assert np.isfinite(played.tokens_per_second()).all()


@pytest.mark.parametrize(
    ("at_limit", "n_max", "n_rounds", "drafted"),
    [
        (False, 0, 8, 0),
        (False, 1, 5, 5),  # 2, 2, 1 and 2 tokens, then one more
        (True, 1, 5, 4),  # which needs no draft where the limit is
        (False, 4, 3, 12),
        (True, 4, 3, 6),  # of three tokens that are left, two can be drafted
    ],
)
def test_rounds_that_chance_decided_come_again_until_the_text_is_whole(
    at_limit: bool, n_max: int, n_rounds: int, drafted: int
) -> None:
    rounds = replace(
        recorded([(4, 4, 50.0), (4, 1, 50.0), (4, 0, 50.0)]),
        is_independent=True,
        ends_at_limit=np.array([at_limit]),
    )
    played = simulate(rounds, None, FIXED, [{"n_max": n_max}])
    assert int(played.tokens.sum()) == 8
    assert (int(played.rounds.sum()), int(played.drafted.sum())) == (n_rounds, drafted)


def test_switching_off_ends_drafting() -> None:
    rounds = recorded([(2, 0, 30.0)] * 60)
    played = simulate(
        rounds,
        RoundCosts.measured(rounds),
        RULES["switch-off"],
        [{"n_max": 2, "window": 10, "threshold": t} for t in (0.0, 0.5)],
    )
    assert played.drafted[:, 0].tolist() == [120, 20]


def test_a_surface_has_every_pair() -> None:
    store, _, run_id = timed_trace(150)
    rounds = RecordedRounds.of(RunRef(store, run_id))
    found = surface(rounds, p_min=(0.0, 0.5))
    assert found is not None and found.best is not None
    assert found.tokens_per_second.shape == (rounds.n_max, 2)
    assert found.n_max.tolist() == list(range(1, rounds.n_max + 1))
    row, column = found.best
    assert found.tokens_per_second[row, column] == np.nanmax(found.tokens_per_second)
    assert (found.speed_up > 0).all(), "passes of 1 to 5 tokens were all timed"


def test_speed_ups_are_said_of_widths_that_were_timed_only() -> None:
    four = [(3, 3, 40.0)] * 6
    found = surface(recorded(four), p_min=(0.0, 0.5))
    assert found is not None
    assert np.isfinite(found.tokens_per_second).all() and np.isnan(found.speed_up).all()
    found = surface(recorded([*four, *[(0, 0, 10.0)] * 6]), p_min=(0.0, 0.5))
    assert found is not None
    assert np.isfinite(found.speed_up).tolist() == [[False] * 2, [False] * 2, [True, False]]
    result = what_if(recorded(four))
    assert result is not None
    speeds = [e.tokens_per_second is None for e in result.estimates]
    assert speeds == [True, False, False, False], "plain decoding was not timed"


def test_lanes_have_no_speed_of_their_own() -> None:
    store, _, run_id = timed_trace(60)
    store.runs[run_id]["lane"] = "planes"
    rounds = RecordedRounds.of(RunRef(store, run_id))
    assert not rounds.is_timed and RoundCosts.measured(rounds) is None
    found = surface(rounds)
    assert found is not None and found.best is None


def test_a_width_timed_in_warm_up_alone_is_not_believed() -> None:
    rounds = recorded([(1, 1, 900.0), *[(3, 2, 40.0)] * 6])
    costs = RoundCosts.measured(rounds)
    assert costs is not None
    assert costs.verify(np.array([1, 2, 3, 4])).tolist() == [40.0] * 4
    assert costs.unmeasured(range(1, 5)) == (1, 2, 3)


def test_numbers_seldom_measured_are_left_to_their_neighbours() -> None:
    curve = CostCurve(np.array([1, 2, 3]), np.array([1.0, 9.0, 3.0]), np.array([9, 1, 2]))
    assert curve.trusted(4)(np.array([1, 2, 3])).tolist() == [1.0, 2.0, 3.0]
