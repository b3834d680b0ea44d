"""The rollback benchmark: every policy at every width, and bytes that can be worked out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.errors import OptionError
from engine.experiments.bench.rollback import (
    NO_ROLLBACK,
    ROLLBACK_PHASES,
    bench_layout,
    bench_rollback,
)
from engine.memory.policies import POLICIES

LAYOUT = bench_layout(n_heads=4, d_state=16, n_layers=2, conv_dim=4 * 16 + 2 * 2 * 16)
STATE = 4 * 2 * (4 * 16 * 16 + 3 * 128)
WIDTHS = (1, 4, 9)

Rows = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    found = list(bench_rollback(tuple(POLICIES), WIDTHS, LAYOUT, repeats=3))
    assert [(row["width"], row["policy"]) for row in found] == [
        (width, policy) for width in WIDTHS for policy in (NO_ROLLBACK, *POLICIES)
    ]
    return {(row["policy"], row["width"]): row for row in found}


def test_half_is_kept_and_all_phases_have_a_time(rows: Rows) -> None:
    for (policy, width), row in rows.items():
        assert row["kept"] == (width if policy == NO_ROLLBACK else {1: 1, 4: 2, 9: 4}[width])
        assert set(row["ms"]) == {*ROLLBACK_PHASES, "total"}
        assert row["ms"]["verify"] > 0
        assert row["ms"]["total"] >= row["ms"]["verify"]
        assert 0 < row["min_ms"] <= row["ms"]["total"]
        assert row["over_none"] > 0
    assert rows[NO_ROLLBACK, 9]["over_none"] == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_where_decoding_the_kept_tokens_ends(rows: Rows, policy: str) -> None:
    for width in WIDTHS:
        nmse = rows[policy, width]["state_nmse"]
        assert nmse is not None and nmse < 1e-10


@pytest.mark.parametrize("policy", ["planes", "carry", "ring", "replay"])
def test_the_error_column_sees_a_window_that_was_not_rolled_back(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    faulty = partial(POLICIES[policy], faults=("no-conv-rollback",))
    monkeypatch.setitem(POLICIES, policy, faulty)
    (_, row) = bench_rollback((policy,), (4,), LAYOUT, repeats=1)
    assert row["state_nmse"] is not None and row["state_nmse"] > 1e-3


def test_without_rollback_one_state_is_held_and_written(rows: Rows) -> None:
    for width in WIDTHS:
        row = rows[NO_ROLLBACK, width]
        assert (row["written"], row["copied"], row["saved"], row["restored"]) == (STATE, 0, 0, 0)
        assert (row["held"], row["beyond"]) == (STATE, 0)


def test_planes_write_and_hold_a_state_per_token(rows: Rows) -> None:
    for width in WIDTHS:
        row = rows["planes", width]
        assert row["written"] == row["held"] == width * STATE
        assert row["beyond"] == (width - 1) * STATE
        assert row["saved"] == row["restored"] == 0


@pytest.mark.parametrize("policy", ["ring", "replay"])
def test_ring_and_replay_copy_nothing(rows: Rows, policy: str) -> None:
    for width in WIDTHS:
        row = rows[policy, width]
        assert (row["copied"], row["saved"], row["restored"]) == (0, 0, 0)
        assert row["ms"]["restore"] == row["ms"]["replay"] == 0


def test_a_checkpoint_is_a_state_each_way_and_the_kept_tokens_again(rows: Rows) -> None:
    for width in (4, 9):
        row = rows["checkpoint", width]
        assert (row["saved"], row["restored"], row["beyond"]) == (STATE, STATE, STATE)
        assert row["written"] == 2 * STATE
        assert min(row["ms"][phase] for phase in ("save", "restore", "replay")) > 0
    one = rows["checkpoint", 1]  # nothing can be rejected
    assert (one["saved"], one["restored"], one["beyond"]) == (0, 0, 0)


def test_replay_needs_a_twentieth_of_planes_to_roll_back_sixteen_tokens() -> None:
    layout = bench_layout(n_heads=16, d_state=128, n_layers=1, conv_dim=6144)
    found = bench_rollback(("planes", "replay"), (17,), layout, repeats=1)
    _, planes, replay = found
    assert planes["beyond"] == 16 * 4 * (16 * 128 * 128 + 3 * 6144)
    assert 20 * replay["beyond"] <= planes["beyond"]


def test_keep_decides_how_many_tokens_stay() -> None:
    kept = [row["kept"] for row in bench_rollback(("planes",), (2, 5), LAYOUT, keep=3, repeats=1)]
    assert kept == [2, 2, 5, 3]


def test_only_carry_copies_where_a_ubatch_is_shorter_than_the_snapshots() -> None:
    found = bench_rollback(tuple(POLICIES), (2,), LAYOUT, n_rs_seq=5, repeats=8)
    copied = {row["policy"]: row["copied"] for row in found}
    carried, rest = divmod(copied.pop("carry"), STATE)
    assert 1 <= carried <= 4 and rest == 0
    assert set(copied.values()) == {0}


def test_drafts_deeper_than_the_snapshots_fall_back_to_a_checkpoint() -> None:
    found = list(bench_rollback(("planes", "ring", "replay"), (9,), LAYOUT, n_rs_seq=2, repeats=2))
    for row in found[1:]:
        assert (row["saved"], row["restored"]) == (STATE, STATE)
        assert row["state_nmse"] is not None and row["state_nmse"] < 1e-10


@pytest.mark.parametrize("conv_dim", [64, 100, 4 * 16 + 2 * 3 * 16])
def test_channels_that_do_not_fit_the_heads_are_refused(conv_dim: int) -> None:
    with pytest.raises(OptionError, match="--conv-dim"):
        bench_layout(n_heads=4, d_state=16, n_layers=1, conv_dim=conv_dim)
