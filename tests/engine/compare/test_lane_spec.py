"""Lanes as text, and everything that is no lane."""

from __future__ import annotations

import pytest

from engine.compare.lane_spec import DEFAULT_LANES, NOISE_LANE, LaneSpec
from engine.errors import OptionError
from engine.options import RunOptions


def test_a_lane_changes_only_what_it_names() -> None:
    common = RunOptions(n_predict=9, n_ubatch=64, split="seq", faults=("stale-logits",))
    options = LaneSpec.parse("ring").options(common)
    assert (options.rollback, options.faults, options.n_predict) == ("ring", (), 9)
    assert (options.n_ubatch, options.split) == (64, "seq")


def test_every_key() -> None:
    text = (
        "planes,n_rs_seq=2, split=seq,kv=unified,fault=stale-plane,fault=no-conv-rollback,"
        "replay=trust,ubatch=3,checkpoint_device=device"
    )
    spec = LaneSpec.parse(text)
    options = spec.options(RunOptions())
    assert spec.name == text
    assert (options.rollback, options.n_rs_seq, options.split) == ("planes", 2, "seq")
    assert (options.kv, options.replay, options.n_ubatch) == ("unified", "trust", 3)
    assert options.faults == ("stale-plane", "no-conv-rollback")
    assert options.checkpoint_device == "device"


def test_the_default_lanes() -> None:
    assert [spec.name for spec in DEFAULT_LANES] == ["noise", "checkpoint", "planes"]
    plain = NOISE_LANE.options(RunOptions(rollback="ring", n_rs_seq=4, kv="unified", split="seq"))
    assert (plain.rollback, plain.n_rs_seq, plain.kv, plain.split) == (
        "checkpoint", None, "per-seq", "equal",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "'' is no rollback policy"),
        ("reference", "'reference' is no rollback policy"),
        ("fault=stale-plane", "is no rollback policy"),
        ("planes,", "'' is no setting"),
        ("planes,split", "'split' is no setting"),
        ("planes,split=", "'split=' is no setting"),
        ("planes,drafter=draft-mtp", "is no setting"),
        ("planes,split=diagonal", "--split diagonal is unknown"),
        ("planes,split=seq,split=seq", "split is given twice"),
        ("planes,n_rs_seq=two", "n_rs_seq 'two' is no whole number"),
        ("planes,n_rs_seq=-1", "--n-rs-seq is outside"),
        ("planes,ubatch=0", "-ub is below 1"),
        ("planes,fault=gremlin", "--fault gremlin is unknown"),
        ("planes,kv=shared", "--kv shared is unknown"),
        ("checkpoint,checkpoint_device=moon", "--checkpoint-device moon is unknown"),
        ("checkpoint,replay=verify", "replay=verify chooses tokens of its own"),
    ],
)
def test_what_is_no_lane_is_refused(text: str, what: str) -> None:
    with pytest.raises(OptionError) as caught:
        LaneSpec.parse(text)
    assert what in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.remedy
