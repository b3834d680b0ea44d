"""What a round row says of time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.trace.records import PHASES
from tests.support.golden_runs import decode, options_of, prompt_of, session

MTP = "qwen35-c-v2x-mtp-f32"


def test_a_round_takes_its_phases_and_what_lies_between() -> None:
    prompt = prompt_of(MTP)
    run = decode(session(MTP), [prompt, prompt], replace(options_of(16, "draft-mtp"), parallel=2))
    rounds = run.trace.rounds
    total = rounds.column("total_ms")
    phases = sum(np.nan_to_num(rounds.column(f"{phase}_ms")) for phase in PHASES)
    assert np.all(total >= phases)
    numbers, ends = rounds.column("round"), rounds.column("t_ms")
    by_round = np.bincount(numbers, weights=total)
    end = np.array([ends[numbers == number][0] for number in range(len(by_round))])
    np.testing.assert_allclose(np.cumsum(by_round), end, rtol=1e-5)
    assert np.bincount(numbers).max() == 2, "the time of a round is divided among its sequences"
