"""A recommendation next to a grid of real runs: which settings are run, and what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.cli.tune import grid_lines
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import Configuration
from engine.experiments.tune import record, tune
from engine.experiments.tune.confirm import Confirmed
from engine.experiments.tune.lengths import DraftSetting
from engine.experiments.tune.record import TunePlan
from engine.experiments.tune.tune import (
    GRID_FLOORS,
    GRID_LENGTHS,
    GridCheck,
    check_grid,
    grid_settings,
)
from engine.options import RunOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_TARGET, demo_prompts

NONE: Any = None
TEXTS = [NamedPrompt("a", "b", "")]


def played(chosen: DraftSetting | None, monkeypatch: pytest.MonkeyPatch) -> GridCheck:
    """A grid in which longer drafts are faster, n_max 12 by luck of its first run alone."""

    def run(_: object, __: object, all_of: Sequence[Configuration], pairs: int) -> list[Confirmed]:
        found = []
        for one in all_of:
            n = float(one.options.spec.n_max if one.options.spec.types else 0)
            speeds = [10.0 + min(n, 8.0)] * pairs
            if n == 12 and pairs == 1:
                speeds[0] = 99.0
            found.append(Confirmed(one.name, tuple(speeds), 1, 1, ()))
        return found

    monkeypatch.setattr(tune, "confirm", run)
    rates = (0.5,) * 16
    plan = TunePlan(TEXTS, RunOptions(), ["draft-mtp"], rates=rates)
    return check_grid(NONE, (), plan, chosen)


def test_the_fastest_are_run_again_beside_the_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = played(DraftSetting("draft-mtp", 2), monkeypatch)
    assert len(found.grid) == 1 + len(GRID_LENGTHS)
    assert {one.name: len(one.speeds) for one in found.grid} == {
        "plain": 2,
        **{f"draft-mtp, n_max {n}": 1 + (n >= 4) for n in GRID_LENGTHS},
    }
    lengths = [one.name.rpartition(" ")[2] for one in found.finalists]
    assert lengths == ["plain", "12", "8", "6", "4", "2"]
    assert found.share == pytest.approx(12 / 18)
    assert found.against_fastest is not None and found.against_fastest.wins == 0
    *_, last = grid_lines(found)
    assert last.startswith("recommended: draft-mtp, n_max 2, at 66.7 % of the fastest; ")


def test_plain_decoding_and_the_best_itself_may_be_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert played(None, monkeypatch).recommended.name == "plain"
    best = played(DraftSetting("draft-mtp", 8), monkeypatch)
    assert best.share == 1.0 and best.against_fastest is None
    assert [*grid_lines(best)][-1].endswith("it is the fastest")


def test_a_grid_has_floors_where_they_mean_something() -> None:
    found = grid_settings(["draft-mtp", "ngram-mod", "ngram-cache"])
    assert len(found) == len(set(found)) == len(GRID_LENGTHS) * (len(GRID_FLOORS) + 1)
    assert {one.n_max for one in grid_settings(["draft-mtp"], (0.9,) * 4)} == {1, 2, 3, 4}


def test_a_draft_models_rounds_are_played_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "LENGTHS", (1, 3))
    monkeypatch.setattr(tune, "FLOORS", ((4, 0.5),))
    monkeypatch.setattr(record, "_LENGTHS", (1, 4))
    session = Session.open(DEMO_TARGET, DEMO_DRAFT)
    prompts = [session.prompt(text) for text in demo_prompts()[:1]]
    base = RunOptions(n_predict=12, ignore_eos=True)
    plan = TunePlan(TEXTS, base, ["draft-simple"])
    found = tune.simulator_error(session, prompts, plan, 2)
    assert [one.setting.n_max for one in found] == [1, 3, 4]
    assert [one.simulated_per_round for one in found] == pytest.approx(
        [one.real_per_round for one in found]
    )
    assert all(min(one.real) > 0 and min(one.simulated) > 0 for one in found)
    assert all(len(one.real) == len(one.simulated) == 2 for one in found)
