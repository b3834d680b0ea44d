"""Runs recorded for tuning: drafts longer than what was verified, judged by the text."""

from __future__ import annotations

import numpy as np
import pytest

from engine.analysis.what_if.recorded import RecordedRounds
from engine.options import RunOptions
from engine.options.speculation import SpecOptions
from engine.session import Session
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET

PROMPT = "def quicksort(arr):"


@pytest.fixture(scope="module")
def demo() -> Session:
    return Session.open(DEMO_TARGET, compute="f32")


def play(session: Session, **spec: object) -> tuple[list[int], RecordedRounds]:
    trace = TraceStore()
    options = RunOptions(
        n_predict=40, ignore_eos=True, spec=SpecOptions(types=("draft-mtp",), **spec)
    )
    run = session.start([session.prompt(PROMPT)], options, trace)
    while run.advance():
        pass
    (emitted,) = run.emitted
    return emitted, RecordedRounds.of(RunRef(trace, run.run_id))


def test_what_is_not_verified_is_judged_by_the_text(demo: Session) -> None:
    whole, full = play(demo, n_max=4)
    text, cut = play(demo, n_max=4, verify_max=2)
    none_text, none = play(demo, n_max=4, verify_max=0)
    assert whole == text == none_text, "what is verified does not change the text"
    assert full.n_max == cut.n_max == none.n_max == 4
    assert cut.verified.max() == 2 and none.verified.max() == 0
    assert len(none) == len(whole) - 1, "a round for every token after the first"
    # where nothing is verified, every place has a draft: so also where the full run drafted
    for start, accepted, drafted, final in zip(
        full.start, full.accepted, full.drafted, full.is_final, strict=True
    ):
        if drafted == 4 and final:
            assert none.accepted[none.start == start] == accepted
    assert (cut.accepted[~cut.is_final] <= cut.drafted[~cut.is_final]).all()
    assert np.isfinite(none.confidence[none.drafted > 0][:, 0]).all()


def test_a_draft_that_the_token_limit_keeps_short_is_told_from_one_below_the_floor(
    demo: Session,
) -> None:
    _, rounds = play(demo, n_max=4)
    assert rounds.was_cut.tolist() == (rounds.drafted < 4).tolist()
    assert rounds.was_cut.any() and not rounds.was_cut[:-4].any()
    _, floored = play(demo, n_max=4, p_min=0.6)
    below = floored.steps > floored.drafted
    assert below.any() and not (below & floored.was_cut).any()
