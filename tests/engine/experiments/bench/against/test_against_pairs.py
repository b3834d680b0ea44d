"""Turns of two sides, and what their figures come to."""

from __future__ import annotations

import itertools

import pytest

from engine.experiments.bench.against.pairs import Pair, paired_ratio, sign_test, take_turns


@pytest.mark.parametrize("n", [1, 4, 5, 8])
def test_the_sign_test_counts_all_ways_to_be_as_one_sided(n: int) -> None:
    every = list(itertools.product((0.5, 2.0), repeat=n))
    for ratios in every:
        lead = abs(sum(1 if ratio > 1 else -1 for ratio in ratios))
        as_far = sum(abs(sum(1 if r > 1 else -1 for r in other)) >= lead for other in every)
        assert sign_test(ratios) == pytest.approx(as_far / len(every))


def test_equal_figures_count_for_neither_side() -> None:
    assert sign_test([1.0, 1.0]) == 1.0
    assert sign_test([]) == 1.0
    assert sign_test([2.0, 2.0, 2.0, 1.0]) == sign_test([2.0, 2.0, 2.0]) == 0.25


def test_ratios_are_those_of_the_pairs() -> None:
    """The machine was half as fast during the second pair: no ratio changes."""
    found = paired_ratio([Pair(10, 20, 0), Pair(5, 10, 0), Pair(10, 30, 0)])
    assert (found.theirs, found.ours) == (10, 20)
    assert (found.ratio, found.low, found.high, found.n_pairs) == (2, 2, 3, 3)


def test_the_first_side_changes_from_pair_to_pair() -> None:
    order: list[str] = []

    def side(name: str) -> str:
        order.append(name)
        return name

    for number in range(3):
        theirs, ours, _ = take_turns(number, lambda: side("a"), lambda: side("b"))
        assert (theirs, ours) == ("a", "b")
    assert "".join(order) == "abbaab"


def test_waiting_is_told_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = used = 0.0

    def take(seconds: float, of_them_used: float) -> None:
        nonlocal wall, used
        wall, used = wall + seconds, used + of_them_used

    monkeypatch.setattr("engine.experiments.bench.against.pairs.perf_counter", lambda: wall)
    monkeypatch.setattr("engine.experiments.bench.against.pairs.process_time", lambda: used)
    *_, idle = take_turns(0, lambda: take(2.0, 0.5), lambda: take(1.0, 1.0))
    *_, busy = take_turns(1, lambda: take(2.0, 2.0), lambda: take(1.0, 0.0))
    assert (idle, busy) == (0.25, 1.0)
