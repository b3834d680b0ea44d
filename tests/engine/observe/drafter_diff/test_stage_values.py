"""The first value of a run that is another one than in this engine is named, by where it is and by
what it is; a run without a mistake has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.draft import row_drafter
from engine.draft.draft_eagle3 import DraftEagle3
from engine.model.drafters import eagle3
from engine.observe.drafter_diff.records import Cause
from engine.observe.drafter_diff.sides import sides_of
from engine.observe.drafter_diff.stage_values import (
    Call,
    StageValues,
    Walk,
    stage_of_walk,
    values_cause,
)
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.drafter_diff_campaign import opened
from tests.support.drafter_patches import Patch
from tests.support.golden_runs import options_of


def _found(patch: Patch) -> Cause | None:
    """What is found of a short run of EAGLE-3 that is made while the patch is on."""
    session, values, store = opened("eagle3"), StageValues(), TraceStore()
    options = replace(options_of(12, "draft-eagle3"), ignore_eos=True)
    with values.watch():
        run = session.start([session.prompt("import os\n\ndef main(")], options, store)
        while run.step():
            pass
    patch.undo()
    (side,) = sides_of("B", RunRef(store, run.run_id), session)
    return values_cause(session, side, values)


def test_a_run_without_a_mistake_has_no_other_value(monkeypatch: Patch) -> None:
    assert _found(monkeypatch) is None


def test_a_setting_is_named_where_a_result_shows_it() -> None:
    def of(p_min: float, looks: bool) -> Call:
        return Call("F.draft", "draft/f.py", {"self._p_min": p_min}, [], {"": looks})

    walk = Walk([of(0.3, False), of(0.3, True)])
    walk.take(of(0.0, False))
    assert walk.what is None
    walk.take(of(0.0, False))
    assert walk.what == ("self._p_min", 0.0, 0.3) and stage_of_walk(walk) == "candidates"


def test_a_number_of_one_call_is_named_with_its_weights(monkeypatch: Patch) -> None:
    own = eagle3.rms_norm
    core: Any = opened("eagle3").drafts["draft-eagle3"]
    weight = core.model._ffn_norm

    def other(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return own(x, w, 1e5 * eps if w is weight else eps)

    monkeypatch.setattr(eagle3, "rms_norm", other)
    cause = _found(monkeypatch)
    assert cause is not None and cause.stage == "block"
    assert (
        "rms_norm" in cause.about and "ffn_norm" in cause.about and "Eagle3._layers" in cause.about
    )


def test_rows_that_are_scaled_are_named_where_they_are(monkeypatch: Patch) -> None:
    own = DraftEagle3._taken
    monkeypatch.setattr(DraftEagle3, "_taken", lambda self, rows: 3 * own(self, rows))
    cause = _found(monkeypatch)
    assert cause is not None and (cause.stage, cause.side) == ("target rows", "B")
    assert "`DraftEagle3._taken`" in cause.about and "3 times the right value" in cause.about


def test_positions_that_are_moved_are_named_by_how_far(monkeypatch: Patch) -> None:
    own = row_drafter.single_tokens
    monkeypatch.setattr(row_drafter, "single_tokens", lambda requests, n: own(requests, n + 1))
    cause = _found(monkeypatch)
    assert cause is not None and cause.stage == "positions"
    assert "_next" in cause.place and "not" in cause.about
