"""Planes that `carry` copies along: read where passes are shorter than rollbacks, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.analysis.verdict import LaneVerdict
from engine.compare.comparison import Comparison
from engine.memory.planes import PlaneMemory
from tests.support.clean import PASSED
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session
from tests.support.host_chosen import host_chosen  # noqa: F401

pytestmark = pytest.mark.usefixtures("host_chosen")

SHORT = ("carry,ubatch=2", "carry,n_rs_seq=3,ubatch=2", "carry,split=seq,ubatch=3")


def compared() -> dict[str, LaneVerdict]:
    model, prompt = session(MTP_MODELS[0]), prompt_of(MTP_MODELS[0])
    options = options_of(12, n_max=5, ignore_eos=True)
    lanes = specs("carry", *SHORT)
    return verdicts(finish(Comparison(model, prompt, options, lanes, draft_accept=(0, 2, 1, 4))))


clean_verdicts = cache(compared)


def spoilt(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    collect = PlaneMemory._collect

    def wrong(self, step, planes, is_window):
        start, carried = collect(self, step, planes, is_window)
        return start, None if carried is None else change(carried)

    return wrong


CHANGES = {
    "a little off": lambda carried: carried * 1.01,
    "one plane off": lambda carried: carried.roll(1, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_copy_is_caught(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = clean_verdicts()
    monkeypatch.setattr(PlaneMemory, "_collect", spoilt(CHANGES[change]))
    wrong = compared()
    for lane, verdict in clean.items():
        assert verdict.verdict in ("reference", *PASSED), lane
        reads_copies = lane.startswith("carry") and "ubatch" in lane
        if not reads_copies:
            assert wrong[lane].verdict == verdict.verdict, lane
        elif "n_rs_seq=3" not in lane:  # of so few planes one may be right by chance
            assert wrong[lane].verdict == "suspect", lane
