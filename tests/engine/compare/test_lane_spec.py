"""Lanes as text, and everything that is not a lane."""

from __future__ import annotations

import pytest

from engine.compare.lane_spec import DEFAULT_LANES, NOISE_LANE, LaneSpec
from engine.compare.lanes import LaneMode, with_mode_lanes
from engine.errors import OptionError
from engine.options import RunOptions, StateTypes


def test_a_lane_changes_only_what_it_names() -> None:
    common = RunOptions(n_predict=9, n_ubatch=64, split="seq", faults=("stale-logits",))
    options = LaneSpec.parse("ring").options(common)
    assert (options.rollback, options.faults, options.n_predict) == ("ring", (), 9)
    assert (options.n_ubatch, options.split) == (64, "seq")


def test_every_key() -> None:
    text = (
        "planes,n_rs_seq=2, split=seq,kv=unified,fault=stale-plane,fault=no-conv-rollback,"
        "replay=trust,ubatch=3,checkpoint_device=device,batch-invariant"
    )
    spec = LaneSpec.parse(text)
    options = spec.options(RunOptions())
    assert spec.name == text
    assert (options.rollback, options.n_rs_seq, options.split) == ("planes", 2, "seq")
    assert (options.kv, options.replay, options.n_ubatch) == ("unified", "trust", 3)
    assert options.faults == ("stale-plane", "no-conv-rollback")
    assert options.checkpoint_device == "device"
    assert options.batch_invariant
    assert not LaneSpec.parse("planes").options(RunOptions()).batch_invariant
    assert LaneSpec.parse("noise,batch-invariant").options(RunOptions()).batch_invariant


def test_the_default_lanes() -> None:
    assert [spec.name for spec in DEFAULT_LANES] == ["noise", "checkpoint", "planes", "carry,forks"]
    plain = NOISE_LANE.options(RunOptions(rollback="ring", n_rs_seq=4, kv="unified", split="seq"))
    assert (plain.rollback, plain.n_rs_seq, plain.kv, plain.split) == (
        "checkpoint",
        None,
        "per-seq",
        "equal",
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "'' is not a rollback policy"),
        ("reference", "'reference' is not a rollback policy"),
        ("fault=stale-plane", "is not a rollback policy"),
        ("planes,", "'' is not a setting"),
        ("planes,split", "'split' is not a setting"),
        ("planes,split=", "'split=' is not a setting"),
        ("planes,drafter=draft-mtp", "is not a setting"),
        ("planes,split=diagonal", "--split diagonal is unknown"),
        ("planes,split=seq,split=seq", "split is given twice"),
        ("planes,n_rs_seq=two", "n_rs_seq 'two' is not a whole number"),
        ("planes,n_rs_seq=-1", "--n-rs-seq is outside"),
        ("planes,ubatch=0", "-ub is below 1"),
        ("planes,fault=gremlin", "--fault gremlin is unknown"),
        ("planes,kv=shared", "--kv shared is unknown"),
        ("checkpoint,checkpoint_device=moon", "--checkpoint-device moon is unknown"),
        ("checkpoint,replay=verify", "replay=verify samples its own tokens"),
        ("planes,compute=fp8", "compute 'fp8' is unknown"),
        ("planes,cache_type_s=fp8", "--cache-type-s fp8 is unknown"),
        ("planes,compute=auto", "compute 'auto' is unknown"),
        ("planes,free=2", "'free=2' is not a setting"),
        ("planes,free,free=1", "free is given twice"),
        ("planes,batch-invariant=0", "'batch-invariant=0' is not a setting"),
        ("planes,batch-invariant,batch-invariant", "batch-invariant is given twice"),
        ("noise", "'noise' is not a rollback policy"),
        ("noise,fault=stale-plane", "'fault=stale-plane' is not a setting"),
        ("reference,split=seq", "'split=seq' is not a setting"),
        ("reference,free", "'free' is not a setting"),
        ("peer,compute=int8", "'compute=int8' is not a setting"),
    ],
)
def test_what_is_no_lane_is_refused(text: str, what: str) -> None:
    with pytest.raises(OptionError) as caught:
        LaneSpec.parse(text)
    assert what in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.remedy


def test_lanes_that_are_no_policies() -> None:
    assert LaneSpec.parse("peer").kind == "peer"
    mode = LaneSpec.parse("reference,compute=bf16")
    assert (mode.kind, mode.compute, mode.free) == ("reference", "bf16", False)
    noise = LaneSpec.parse("noise,split=seq,kv=unified,ubatch=4")
    options = noise.options(RunOptions(rollback="ring", faults=("stale-logits",)))
    assert (noise.kind, noise.compute) == ("noise", None)
    assert (options.rollback, options.faults) == ("checkpoint", ())
    assert (options.split, options.kv, options.n_ubatch) == ("seq", "unified", 4)


def test_free_lanes_and_modes() -> None:
    for text in ("ring,free", "ring,free=1"):
        assert LaneSpec.parse(text).free
    spec = LaneSpec.parse("checkpoint,free,replay=verify,compute=int8")
    assert (spec.options(RunOptions()).replay, spec.compute) == ("verify", "int8")
    assert not LaneSpec.parse("ring").free and LaneSpec.parse("ring").compute is None


def names(*texts: str, compute: str = "f32", s: str = "f32") -> list[str]:
    common = LaneMode(compute, StateTypes(s))
    return [s.name for s in with_mode_lanes([LaneSpec.parse(t) for t in texts], common)]


def test_a_mode_brings_its_own_reference_and_noise() -> None:
    leaders = ["reference,compute=int8", "noise,compute=int8"]
    ours = "ring,compute=int8"
    assert names("planes", ours, "carry,compute=int8") == [
        "planes",
        *leaders,
        ours,
        "carry,compute=int8",
    ]
    peer = ["peer", "noise,peer=1", "noise,peer=2", "noise,peer=3"]
    assert names("ring,compute=f32", "peer") == ["ring,compute=f32", *peer]
    assert names("ring", "ring,compute=f32", compute="int8") == [
        "ring",
        "reference,compute=f32",
        "noise,compute=f32",
        "ring,compute=f32",
    ]
    # given ones are used, wherever they stand
    assert names(ours, *leaders) == names(*leaders, ours) == [*leaders, ours]
    assert names("reference,compute=int8") == ["reference,compute=int8"]
    assert names("noise,compute=int8") == leaders


def test_types_of_states_are_a_mode_too() -> None:
    lane = "planes,cache_type_s=bf16,gate_type=f16"
    found = LaneSpec.parse(lane).options(RunOptions(state_types=StateTypes("f16", "f16")))
    assert found.state_types == StateTypes("bf16", "f16", "f16")
    assert names("planes", lane, "ring,cache_type_s=f32") == [
        "planes",
        "reference,cache_type_s=bf16,gate_type=f16",
        "noise,cache_type_s=bf16,gate_type=f16",
        lane,
        "ring,cache_type_s=f32",
    ]
    assert names("ring,cache_type_s=f32,compute=int8", s="bf16") == [
        "reference,compute=int8,cache_type_s=f32",
        "noise,compute=int8,cache_type_s=f32",
        "ring,cache_type_s=f32,compute=int8",
    ]


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (("reference,cache_type_s=f32",), "equals the reference lane"),
        (("ring", "ring"), "'ring' is given twice"),
        (("reference,compute=f32",), "equals the reference lane"),
        (("reference,compute=int8", "reference, compute=int8"), "is given twice"),
    ],
)
def test_lanes_that_do_not_go_together(texts: tuple[str, ...], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        names(*texts)
