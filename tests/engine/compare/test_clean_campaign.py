"""A few of the random clean comparisons that tests.support.clean_campaign plays by the hundred."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.clean_campaign import MODES, play


@pytest.mark.parametrize("mode", MODES)
def test_no_clean_lane_is_accused(mode: str) -> None:
    game = play(np.random.default_rng((1, 0)), [mode])
    assert len(game.verdicts) >= 4
    assert game.accused == [], game.what
