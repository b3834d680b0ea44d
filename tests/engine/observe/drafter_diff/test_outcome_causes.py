"""What counts of rounds are, where they are not what the rounds were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.audit.recorded_drafts import RecordedDraft
from engine.observe.drafter_diff.outcome_causes import _miscounted, rule_cause

_TRUE = [(3, 3), (1, 3), (0, 3), (2, 3), (3, 3), (1, 2)]


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ([(4, 3), (2, 3), (1, 3), (3, 3), (4, 3), (2, 2)], "own token of a round as an accepted"),
        (
            [(3, 3), (2, 4), (0, 3), (4, 5), (3, 3), (2, 3)],
            "replays after a rejection again, as dr",
        ),
        ([(3, 3), (3, 5), (1, 4), (5, 6), (3, 3), (3, 4)], "with the target's own, again"),
        ([(3, 3), (1, 2), (0, 1), (2, 3), (3, 3), (1, 2)], "fewer"),
        ([(1, 3), (1, 3), (0, 3), (1, 3), (1, 3), (1, 2)], "one for any number"),
        ([(0, 3), (3, 3), (1, 3), (0, 3), (2, 3), (3, 2)], "those of the round before"),
        ([(3, 3), (3, 3), (0, 3), (2, 3), (3, 3), (2, 2)], "did not draft"),
    ],
)
def test_a_way_of_counting_is_named(counted: list[tuple[int, int]], words: str) -> None:
    assert words in _miscounted([*zip(_TRUE, counted, strict=True)])


def test_a_rejected_token_that_is_drawn_again_shows_no_residual() -> None:
    drafts = [RecordedDraft(i, 3 * i, [7, 8], [], 0, 0, 0.0, 2) for i in range(4)]
    store = SimpleNamespace(facts=SimpleNamespace(synthetic="", draft_accept=None))
    side: Any = SimpleNamespace(
        drafts=drafts, draws=True, run=store, name="B", n_confirmed=lambda _: 1, advance=lambda _: 0
    )
    cause = rule_cause(side)
    assert cause is not None and "not from the residual" in cause.about
