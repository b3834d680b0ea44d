"""Drawing by a number in [0, 1)."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.distribution import Distribution, softmax


def test_a_number_falls_on_the_token_whose_share_it_is_in() -> None:
    d = Distribution.of_weights(np.array([7, 3, 5, 9]), np.array([2.0, 0.0, 1.0, 1.0]))
    assert d.ids.tolist() == [7, 5, 9]
    assert [d.at(u) for u in (0.0, 0.49, 0.5, 0.74, 0.75, np.nextafter(1, 0))] == [7, 7, 5, 5, 9, 9]
    assert (d.of(7), d.of(3), d.of(5), d.of(1)) == (0.5, 0.0, 0.25, 0.0)


def test_rounding_in_the_sum_never_runs_off_the_end() -> None:
    d = Distribution(np.arange(10), np.full(10, 0.0999999))
    assert d.at(np.nextafter(1, 0)) == 9


def test_certain_is_certain() -> None:
    d = Distribution.certain(4)
    assert {d.at(u) for u in (0.0, 0.5, np.nextafter(1, 0))} == {4}
    assert d.of(4) == 1.0


@pytest.mark.parametrize("temp", [5e-324, 1e-9, 1.0, 1e9])
def test_softmax_stays_finite_at_any_temperature(temp: float) -> None:
    p = softmax(np.array([-np.inf, 2.0, 1e30, 3.0], np.float32), temp)
    assert np.isfinite(p).all() and p.sum() == pytest.approx(1.0)
    assert p[0] == 0 and p[2] == 1
