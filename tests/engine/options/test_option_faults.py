"""What is said of a fault, against whether a lane with it differs from the lane without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.compare.lane_spec import LaneSpec
from engine.options import LANE_FAULTS, RunOptions, SpecOptions
from engine.options.faults import notes_on, why_idle
from tests.support.comparisons import finish, verdicts
from tests.support.golden_runs import MTP_MODELS, options_of, prompt_of, session

N_MAX = 4
SETTINGS = (
    "planes",
    "planes,ubatch=4",
    "planes,ubatch=5",
    "planes,split=seq,ubatch=3",
    "planes,split=seq,ubatch=5",
    "planes,n_rs_seq=2,ubatch=3",
    "planes,n_rs_seq=2,ubatch=2",
    "planes,n_rs_seq=0",
    "planes,ubatch=1",
    "carry",
    "carry,n_rs_seq=3",
    "carry,n_rs_seq=0",
    "ring,ubatch=2",
    "replay,n_rs_seq=2",
    "checkpoint",
)


@cache
def compared() -> Comparison:
    options = options_of(14, n_max=N_MAX, ignore_eos=True)
    adds = ["", *(f",fault={fault}" for fault in LANE_FAULTS)]
    lanes = [LaneSpec.parse(f"{text}{add}") for text in SETTINGS for add in adds]
    model, prompt = session(MTP_MODELS[0]), prompt_of(MTP_MODELS[0])
    return finish(Comparison(model, prompt, options, lanes, draft_accept=(0, 3, 2, 1)))


@pytest.mark.parametrize("fault", LANE_FAULTS)
def test_a_fault_acts_where_nothing_says_that_it_cannot(fault: str) -> None:
    comparison = compared()
    found, rows = verdicts(comparison), comparison.trace.divergence
    for text in SETTINGS:
        lane = f"{text},fault={fault}"
        both = [rows.column("run_id") == found[name].run_id for name in (text, lane)]
        columns = ("nmse", "state_error", "conv_error", "cells_differ")
        same = all(
            np.array_equal(*(rows.column(c)[mine] for mine in both), equal_nan=True)
            for c in columns
        )
        options = LaneSpec.parse(lane).options(options_of(22, n_max=N_MAX))
        why = why_idle(fault, options, N_MAX, is_led=True)
        assert bool(why) == same, (lane, why)


def test_a_note_says_what_to_change() -> None:
    spec = SpecOptions(types=("draft-mtp",), n_max=3)
    options = RunOptions(spec=spec, faults=("stale-plane", "stale-logits"))
    (note,) = notes_on(options)
    assert note.startswith("Fault stale-plane cannot act:") and "-ub to 3 or less" in note
    assert notes_on(replace(options, n_ubatch=3)) == []
    (note,) = notes_on(replace(options, rollback="ring"))
    assert "choose planes" in note
    (note,) = notes_on(replace(options, faults=("keep-stale-kv",)))
    assert "--n-rs-seq to 2" in note and "--rollback checkpoint" in note
    assert notes_on(replace(options, faults=("keep-stale-kv",), n_rs_seq=2)) == []
    nothing = replace(options, spec=SpecOptions())
    assert len(notes_on(nothing)) == 2 and "--spec-type" in notes_on(nothing)[0]
    of_sampler = replace(options, faults=("sampler-not-restored",))
    assert notes_on(of_sampler) == []
    (note,) = notes_on(of_sampler, 3, is_led=True)
    assert "`free`" in note
    looked_up = replace(options, spec=SpecOptions(types=("ngram-simple",)))
    assert "--n-rs-seq" in notes_on(replace(looked_up, faults=("plane-off-by-one",)))[0]


def test_faults_between_prompts_need_a_conversation() -> None:
    spec = SpecOptions(types=("draft-mtp",), n_max=3)
    faults = ("checkpoint-boundary", "checkpoint-invalidated", "rollback-twice", "mtp-carried")
    options = RunOptions(spec=spec, faults=faults, rollback="ring")
    assert len(notes_on(options)) == 4 and "--turns" in notes_on(options)[0]
    assert notes_on(options, has_cache=True) == []
    (note,) = notes_on(replace(options, rollback="planes"), has_cache=True)
    assert "choose carry, ring or replay" in note
    notes = notes_on(replace(options, spec=SpecOptions()), has_cache=True)
    assert "raise --n-rs-seq" in notes[0] and "--spec-type" in notes[1]
