"""A few of the random clean comparisons and audited runs that tests.support.clean_campaign plays by
the hundred."""

from __future__ import annotations

import pytest

from tests.support.clean_campaign import play
from tests.support.clean_settings import MODES, models


@pytest.mark.parametrize("mode", ["f32", "blocks", "q8"])  # the others are in the last test
@pytest.mark.thinned(4)
def test_no_clean_lane_is_accused(mode: str) -> None:
    game = play(MODES.index(mode), 1, "comparisons", [mode])
    assert len(game.verdicts) >= 3
    assert game.accused == [], game.what


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thinned(4)
def test_no_clean_run_is_accused(mode: str) -> None:
    game = play(5 * MODES.index(mode), 1, "runs", [mode])
    assert game.facts
    assert game.accused == [], game.what


@pytest.mark.skipif(len(models()) < 20, reason="numbers are those with all golden models")
@pytest.mark.parametrize("number", [204, 225, 249, 486, 569])
@pytest.mark.thinned(4)
def test_what_was_accused_once_is_clean(number: int) -> None:
    """States in f16 over several rounds, experts tipped in int8, both in bf16, and a noise lane in
    int8 with experts."""
    game = play(number, 33, "comparisons")
    assert game.accused == [], game.what
