"""A recording played again is the run that it stands for; a search by trials."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.analysis.what_if.recorded import CostCurve
from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import Configuration, measure_request
from engine.experiments.tune.advice import estimates, outcome
from engine.experiments.tune.confirm import search
from engine.experiments.tune.lengths import DraftSetting, drafting
from engine.experiments.tune.record import TunePlan, completed, record
from engine.options import RunOptions
from tests.support.golden_runs import options_of, prompt_of, session

NAME = "qwen35-c-v2x-mtp-f32"
BASE = options_of(24, ignore_eos=True)
TEXTS = [NamedPrompt("a", "b", "")]


def test_a_recording_tells_the_rounds_of_real_runs() -> None:
    prompt = prompt_of(NAME)
    (found,) = record(session(NAME), [prompt], TunePlan(TEXTS, BASE, ["draft-mtp"]))
    assert found.rounds.n_max == 16
    assert found.rounds.verified.max() == 0
    assert found.costs is not None
    assert found.costs.unmeasured([1, 2, 3, 4, 5, 6, 8, 9]) == ()
    assert found.costs.plain_ms > 0
    for setting in (DraftSetting("draft-mtp", 2), DraftSetting("draft-mtp", 5)):
        played = outcome(found, setting)
        one = Configuration("x", drafting(BASE, setting))
        real = measure_request(session(NAME), prompt, "p", one)
        assert int(played.rounds.sum()) == real.num_rounds
        assert int(played.drafted.sum()) == real.draft_n
        assert int(played.accepted.sum()) == real.draft_n_accepted
        assert int(played.tokens.sum()) == real.predicted_n - 1
    every = estimates([found])
    assert {one.drafter for one in every} == {"draft-mtp"}
    assert all(np.isfinite(one.tokens_per_second) for one in every)


def test_synthetic_acceptance_is_recorded_with_its_rates() -> None:
    rates = (1.0, 1.0, 0.0, 0.0)
    plan = TunePlan(TEXTS, BASE, ["draft-mtp"], rates=rates)
    (found,) = record(session(NAME), [prompt_of(NAME)], plan)
    assert found.rounds.n_max == 4
    full = found.rounds.drafted == 4
    assert full.any()
    assert set(found.rounds.accepted[full].tolist()) == {2}
    assert outcome(found, DraftSetting("draft-mtp", 2)).acceptance()[0] == pytest.approx(1.0)
    for n_max in (1, 2, 3, 4):
        setting = DraftSetting("draft-mtp", n_max)
        played = outcome(found, setting)
        one = Configuration("x", drafting(BASE, setting, rates=rates))
        real = measure_request(session(NAME), prompt_of(NAME), "p", one)
        assert int(played.rounds.sum()) == real.num_rounds
        assert int(played.drafted.sum()) == real.draft_n
        assert int(played.accepted.sum()) == real.draft_n_accepted
        assert int(played.tokens.sum()) == real.predicted_n - 1


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.thinned(4)
def test_the_luck_of_a_round_is_that_of_real_runs_of_any_length(seed: int) -> None:
    rates = (0.9, 0.6, 0.5, 0.2, 0.2, 0.1)
    base = replace(BASE, sampler=replace(BASE.sampler, seed=seed))
    plan = TunePlan(TEXTS, base, ["draft-mtp"], rates=rates)
    (found,) = record(session(NAME), [prompt_of(NAME)], plan)
    for n_max in (1, 2, 4, 6):
        setting = DraftSetting("draft-mtp", n_max)
        played = outcome(found, setting)
        one = Configuration("x", drafting(base, setting, rates=rates))
        real = measure_request(session(NAME), prompt_of(NAME), "p", one)
        assert int(played.rounds.sum()) == real.num_rounds
        assert int(played.drafted.sum()) == real.draft_n
        assert int(played.accepted.sum()) == real.draft_n_accepted


def test_numbers_measured_too_rarely_are_taken_from_the_others() -> None:
    own = CostCurve(np.array([1, 3, 4]), np.array([1.0, 9.0, 4.0]), np.array([50, 2, 1]))
    others = CostCurve(np.array([1, 2, 3]), np.array([7.0, 2.0, 3.0]), np.array([9, 9, 9]))
    found = completed(own, others)
    assert found.at.tolist() == [1, 2, 3, 4]
    assert found.ms.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("pairs", "drafters"), [(5, ["suffix"]), (6, [])])
def test_a_plan_that_shows_nothing_is_refused(pairs: int, drafters: list[str]) -> None:
    with pytest.raises(OptionError):
        TunePlan(TEXTS, RunOptions(), drafters, pairs)


def test_trials_are_real_runs_the_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Trial:
        def __init__(self, number: int, rollback: str) -> None:
            self.number, self.params, self.value = number, {"rollback": rollback}, 0.0

        def suggest_int(self, name: str, low: int, high: int) -> int:
            self.params[name] = low
            return low

        def suggest_categorical(self, name: str, values: list[str]) -> str:
            return self.params.setdefault(name, values[0])

    class Study:
        trials = (Trial(0, "planes"), Trial(1, "ring"))

        def enqueue_trial(self, params: dict[str, Any]) -> None:
            asked.append(params)

        def optimize(self, measured: Any, n_trials: int) -> None:
            for trial in self.trials[:n_trials]:
                trial.value = measured(trial)

    fake: Any = ModuleType("optuna")
    fake.logging = SimpleNamespace(set_verbosity=lambda level: None, WARNING=30)
    fake.samplers = SimpleNamespace(TPESampler=lambda seed: None)
    fake.create_study = lambda direction, sampler: Study()
    monkeypatch.setitem(sys.modules, "optuna", fake)
    options = drafting(BASE, DraftSetting("draft-mtp", 2))
    said: list[str] = []
    rows = search(session(NAME), [prompt_of(NAME)], options, 2, said.append)
    assert asked[0]["rollback"] == "planes"  # what is in use is tried first
    assert {row["rollback"] for row in rows} == {"planes", "ring"}
    assert rows[0]["tokens_per_second"] >= rows[1]["tokens_per_second"] > 0
    assert len(said) == 2
