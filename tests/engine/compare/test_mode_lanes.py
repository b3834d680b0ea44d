"""Lanes of other compute modes: the mode's distance and the rollback are judged apart."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from engine.compare.comparison import Comparison
from engine.compare.lanes import LaneMode, with_mode_lanes
from engine.options import StateTypes
from engine.session import Session
from tests.support.comparisons import differences_of, finish, rounds_of, specs, verdicts
from tests.support.golden_runs import DATA, MTP_MODELS, options_of, prompt_of, session

MTP = MTP_MODELS[0]
FAULTY = "planes,compute=int8,fault=no-conv-rollback"


@cache
def compared() -> Comparison:
    options = options_of(50, "draft-mtp", n_max=5, ignore_eos=True)
    lanes = specs("planes", "planes,compute=int8", "checkpoint,compute=bf16", FAULTY)
    return finish(Comparison(session(MTP), prompt_of(MTP), options, lanes))


def test_a_rollback_is_right_whatever_the_mode_costs() -> None:
    found = verdicts(compared())
    assert list(found) == [
        "reference",
        "noise",
        "planes",
        "reference,compute=int8",
        "noise,compute=int8",
        "planes,compute=int8",
        "reference,compute=bf16",
        "noise,compute=bf16",
        "checkpoint,compute=bf16",
        FAULTY,
    ]
    passed = ("within", "exact")
    assert {name: v.verdict for name, v in found.items() if v.verdict not in passed} == {
        "reference": "reference",
        "reference,compute=int8": "mode",
        "reference,compute=bf16": "mode",
        FAULTY: "suspect",
    }
    for mode in ("bf16", "int8"):
        noise = found[f"noise,compute={mode}"]
        assert noise.bound == max(1e-9, 10 * noise.worst_nmse) < 0.1
        distance = found[f"reference,compute={mode}"]
        assert 1e-6 < distance.worst_nmse < 0.1
        assert not distance.is_beyond
    assert found["planes,compute=int8"].worst_nmse <= found["planes,compute=int8"].bound


def test_the_fault_is_found_behind_the_rollback_that_it_spoils() -> None:
    clean = rounds_of(compared(), "planes,compute=int8")
    spoilt = clean["round"][clean["rollback_depth"] > 0]
    fault = verdicts(compared())[FAULTY]
    assert (fault.after_round, fault.first_round) == (spoilt[0], spoilt[0] + 1)


def test_the_modes_distance_is_that_of_its_logits() -> None:
    """Against a forward pass over everything in either mode; widths differ, so not bit by bit."""
    comparison = compared()
    tokens = [*prompt_of(MTP).tokens, *comparison.emitted[0]]
    rows = differences_of(comparison, "reference,compute=bf16")
    with_bf16 = Session.open(DATA / f"{MTP}.gguf", compute="bf16")
    a, b = (each.logits(tokens).astype(np.float64) for each in (session(MTP), with_bf16))
    nmse = ((a - b) ** 2).mean(1) / (a**2).mean(1)
    expected = nmse[rows["pos"] - 1]
    assert np.median(rows["nmse"] / expected) == pytest.approx(1, rel=0.3)


def test_lanes_of_a_mode_follow_that_modes_lane() -> None:
    comparison = compared()
    runs = {facts["lane"]: facts for facts in comparison.trace.runs.values()}
    ids = {facts["lane"]: run for run, facts in comparison.trace.runs.items()}
    mode = ids["reference,compute=int8"]
    assert runs["planes,compute=int8"]["lane_against"] == mode
    assert runs["noise,compute=int8"]["lane_against"] == mode
    assert runs["reference,compute=int8"]["lane_against"] == ids["reference"]
    assert runs["planes"]["lane_against"] == ids["reference"]
    assert runs["reference"]["lane_against"] is None
    assert [runs[f"reference,compute={m}"]["compute"] for m in ("int8", "bf16")] == ["int8", "bf16"]
    bytes_of = {name: facts["weight_bytes"] for name, facts in runs.items()}
    assert bytes_of["planes,compute=int8"] < bytes_of["planes"] == bytes_of["reference"]
    for lane in ("planes,compute=int8", "reference,compute=int8"):
        assert differences_of(comparison, lane)["token_id"].tolist() == comparison.emitted[0]


def test_a_lane_with_ubatches_of_its_own_has_noise_with_the_same_ones() -> None:
    common = LaneMode("bf16", StateTypes())

    def names(*lanes: str) -> list[str]:
        return [one.name for one in with_mode_lanes(specs(*lanes), common)]

    assert names("planes,ubatch=3", "ring,ubatch=3", "ring") == [
        "noise",
        "noise,ubatch=3",
        "planes,ubatch=3",
        "ring,ubatch=3",
        "ring",
    ]
    assert names("planes,ubatch=3,compute=int8")[2:] == [
        "noise,compute=int8",
        "noise,compute=int8,ubatch=3",
        "planes,ubatch=3,compute=int8",
    ]
    given = ["noise,ubatch=3", "planes,ubatch=3"]
    assert names(*given)[-2:] == given


def test_one_set_of_weights_per_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, asked = Session.open(DATA / f"{MTP}.gguf", compute="int8"), []
    monkeypatch.setattr("engine.warm_up.load_model", _counting(asked))
    lanes = specs("ring,compute=f32", "planes,compute=f32", "ring")
    comparison = Comparison(opened, prompt_of(MTP), options_of(4, "draft-mtp"), lanes)
    assert asked == ["f32"]
    found = verdicts(finish(comparison))
    assert found["ring,compute=f32"].verdict in ("within", "exact")
    assert found["ring,compute=f32"].compute == "f32"
    assert found["ring"].compute == "int8"


def _counting(asked: list[str]):
    from engine.model.loader import load_model

    def load(file, *, compute, **others):
        asked.append(compute)
        return load_model(file, compute=compute, **others)

    return load
