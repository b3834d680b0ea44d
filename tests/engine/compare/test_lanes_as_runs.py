"""A lane does to its memory what a run with the same settings does: the same passes, checkpoints,
filler and rollbacks, round by round."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine.analysis.findings.check import recorded
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.options import Prompt, RunOptions, SpecOptions
from engine.session import Session
from engine.trace.records import PHASES
from engine.trace.store import TraceStore
from resources import DEMO_TARGET
from tests.support.clean import PASSED
from tests.support.comparisons import finish, specs, verdicts
from tests.support.golden_runs import MTP_MODELS, decode, prompt_of, session

LANES = (
    "carry",
    "planes",
    "planes,n_rs_seq=1",
    "planes,split=seq",
    "ring,n_rs_seq=2,kv=unified",
    "replay",
    "checkpoint",
    "planes,ubatch=3",
)
MODELS = (MTP_MODELS[0], "demo")
UBATCHES = ("round", "n_seqs", "n_seq_tokens", "n_padding", "purpose", "reason", "seq_ids")
TIMES = ("t_ms", "total_ms", *(f"{phase}_ms" for phase in PHASES))


@cache
def opened(name: str) -> tuple[Session, list[Prompt]]:
    if name != "demo":
        tokens = prompt_of(name).tokens
        return session(name), [Prompt(tokens[i : i + 5 + 3 * i]) for i in range(4)]
    demo = Session.open(DEMO_TARGET, compute="f32")
    texts = ("import os", "class Stack:", "def main():", "def read_file(path):")
    return demo, [demo.prompt(text) for text in texts]


def options_for(name: str) -> RunOptions:
    """Drafts of every length, so that sequences stand side by side and do not."""
    p_min = 0.3 if name == "demo" else 0.1
    spec = SpecOptions(types=("draft-mtp",), n_max=5, p_min=p_min)
    return RunOptions(parallel=4, n_predict=10, spec=spec)


@cache
def compared(name: str) -> Comparison:
    loaded, prompts = opened(name)
    return finish(Comparison(loaded, prompts, options_for(name), specs(*LANES)))


def rows(trace: TraceStore, table: str, run_id: int, without: tuple[str, ...]) -> dict[str, list]:
    """Columns of the rows of a run, texts decoded."""
    found = trace.tables[table]
    mine = np.flatnonzero(found.column("run_id") == run_id)
    skipped = {"run_id", *without}
    every = [found.row(i) for i in mine.tolist()]
    return {key: [row[key] for row in every] for key in every[0] if key not in skipped}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(4)
def test_sequences_side_by_side_are_clean(name: str) -> None:
    for lane, verdict in verdicts(compared(name)).items():
        assert verdict.verdict in ("reference", *PASSED), (lane, verdict.error)
    assert [f.rule for f in recorded(compared(name).trace) if f.severity == "error"] == []


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(8)
def test_a_lane_does_what_a_run_does(name: str, lane: str) -> None:
    loaded, prompts = opened(name)
    comparison = compared(name)
    run_id = verdicts(comparison)[lane].run_id
    alone = decode(loaded, prompts, LaneSpec.parse(lane).options(options_for(name)))
    assert [result.tokens for result in alone.results()] == comparison.emitted
    without = (*TIMES, "sampler_wrong", "sampler_draws")  # a lane that is led has no sampler
    ours = rows(comparison.trace, "rounds", run_id, without)
    theirs = rows(alone.trace, "rounds", alone.run_id, without)
    for column, values in theirs.items():
        assert ours[column] == values, column
    ours, theirs = (
        rows(trace, "ubatches", run, ("ms",))
        for trace, run in ((comparison.trace, run_id), (alone.trace, alone.run_id))
    )
    for column in UBATCHES:
        assert ours[column] == theirs[column], column
    costs = [
        {f.rule for f in recorded(trace) if f.run_id == run} & {"concurrency-lost"}
        for trace, run in ((comparison.trace, run_id), (alone.trace, alone.run_id))
    ]
    assert costs[0] == costs[1]


def test_filler_and_checkpoints_are_exercised() -> None:
    trace = compared("demo").trace
    run_ids = {v.lane: v.run_id for v in compared("demo").results()}
    padding = {lane: sum(rows(trace, "ubatches", run_ids[lane], ())["n_padding"]) for lane in LANES}
    assert padding["carry"] > 0 and padding["checkpoint"] == padding["planes,split=seq"] == 0
    saved = {
        lane: sum(rows(trace, "rounds", run_ids[lane], ())["checkpoint_bytes"]) for lane in LANES
    }
    assert saved["planes,n_rs_seq=1"] > 0 and saved["checkpoint"] > 0
    assert saved["ring,n_rs_seq=2,kv=unified"] > 0 == saved["replay"] == saved["planes"]


def test_a_led_lane_takes_its_leaders_tokens_even_if_replays_are_verified() -> None:
    loaded, prompts = opened(MTP_MODELS[0])
    options = replace(options_for(MTP_MODELS[0]), replay="verify")
    comparison = finish(Comparison(loaded, prompts, options, specs("checkpoint")))
    assert verdicts(comparison)["checkpoint"].verdict in PASSED
    run_id = verdicts(comparison)["checkpoint"].run_id
    assert comparison.trace.runs[run_id]["options"]["replay"] == "trust"
