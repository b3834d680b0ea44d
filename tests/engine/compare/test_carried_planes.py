"""Planes that `carry` copies along: read where passes are shorter than rollbacks, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.analysis.verdict import LaneVerdict
from engine.compare.comparison import Comparison, start_comparison
from engine.compare.scenario import find_scenario
from engine.memory.planes import PlaneMemory
from engine.session import Session
from resources import DEMO_TARGET, SCENARIOS
from tests.support.clean import PASSED
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session
from tests.support.host_chosen import host_chosen  # noqa: F401

pytestmark = pytest.mark.usefixtures("host_chosen")

SHORT = ("carry,ubatch=2", "carry,n_rs_seq=3,ubatch=2", "carry,split=seq,ubatch=3")


@cache
def demo() -> Session:
    return Session.open(DEMO_TARGET, compute="f32")


def of_the_scenario() -> Comparison:
    return finish(start_comparison(demo(), find_scenario(SCENARIOS, "carried-planes")))


def of_a_golden_model() -> Comparison:
    model, prompt = session(MTP_MODELS[0]), prompt_of(MTP_MODELS[0])
    options = options_of(24, n_max=5, ignore_eos=True)
    return finish(
        Comparison(model, prompt, options, specs("carry", *SHORT), draft_accept=(0, 2, 1, 4))
    )


@cache
def clean_verdicts(compare: Callable[[], Comparison]) -> dict[str, LaneVerdict]:
    return verdicts(compare())


def spoilt(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    collect = PlaneMemory._collect

    def wrong(self, step, planes, is_window):
        start, carried = collect(self, step, planes, is_window)
        return start, None if carried is None else change(carried)

    return wrong


CHANGES = {
    "a little off": lambda carried: carried * 1.01,
    "one plane off": lambda carried: carried.roll(1, 0),
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize(
    ("compare", "change"),
    [(of_the_scenario, "a little off"), *((of_a_golden_model, name) for name in CHANGES)],
)
def test_a_wrong_copy_is_caught(
    compare: Callable[[], Comparison], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = clean_verdicts(compare)
    monkeypatch.setattr(PlaneMemory, "_collect", spoilt(CHANGES[change]))
    wrong = verdicts(compare())
    for lane, verdict in clean.items():
        assert verdict.verdict in ("reference", *PASSED), lane
        reads_copies = lane.startswith("carry") and "ubatch" in lane
        if not reads_copies:
            assert wrong[lane].verdict == verdict.verdict, lane
        elif "n_rs_seq=3" not in lane:  # of so few planes one may be right by chance
            assert wrong[lane].verdict == "suspect", lane
