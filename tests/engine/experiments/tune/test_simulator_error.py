"""The simulator beside real runs of the demo models: what a round brings is known exactly."""

from __future__ import annotations

import pytest

from engine.experiments.tune import record, simulator_error
from engine.options import RunOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_TARGET, demo_prompts


def test_a_draft_models_rounds_are_played_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_error, "LENGTHS", (1, 3))
    monkeypatch.setattr(simulator_error, "FLOORS", ((4, 0.5),))
    monkeypatch.setattr(record, "_LENGTHS", (1, 4))
    session = Session.open(DEMO_TARGET, DEMO_DRAFT)
    prompts = [session.prompt(p.text) for p in demo_prompts()[:2]]
    base = RunOptions(n_predict=12, ignore_eos=True)
    found = simulator_error.simulator_error(session, prompts, base, "draft-simple", repeats=2)
    assert [one.setting.n_max for one in found] == [1, 3, 4]
    assert [one.simulated_per_round for one in found] == pytest.approx(
        [one.real_per_round for one in found]
    )
    assert all(min(one.real) > 0 and min(one.simulated) > 0 for one in found)
    assert all(len(one.real) == len(one.simulated) == 2 for one in found)
