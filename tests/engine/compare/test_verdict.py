"""Verdicts from rows whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.analysis.noise_ceiling import tipped_share
from engine.analysis.verdict import band, judge, judge_lanes, noise_bound
from engine.trace.store import TraceStore


def lane(trace: TraceStore, name: str, nmse: list[float], rolled_back: dict[int, int]) -> int:
    """Two rows a round, positions from 10, and the depth of every rollback."""
    run_id = trace.begin_run({"lane": name})
    for i, value in enumerate(nmse):
        trace.divergence.append(
            run_id=run_id,
            lane=name,
            round=i // 2,
            seq_id=0,
            pos=10 + i,
            nmse=value,
            max_abs=2 * value,
            kl=3 * value,
            top1_equal=int(value < 0.5),
        )
    for number in range(len(nmse) // 2):
        trace.rounds.append(
            run_id=run_id,
            round=number,
            seq_id=0,
            rollback_depth=rolled_back.get(number, 0),
            kv_cells_duplicate=number,
        )
    return run_id


@pytest.mark.parametrize(
    ("nmse", "name"),
    [
        (0.0, "exact"),
        (1e-12, "<= 1e-6"),
        (1e-6, "<= 1e-6"),
        (1.1e-6, "<= 1e-4"),
        (1e-4, "<= 1e-4"),
        (1.1e-4, "> 1e-4"),
        (math.inf, "not finite"),
        (math.nan, "not finite"),
    ],
)
def test_bands(nmse: float, name: str) -> None:
    assert band(nmse) == name


def test_the_bound_is_ten_times_the_noise_but_never_nothing() -> None:
    trace = TraceStore()
    assert noise_bound(trace, []) == 1e-9
    quiet = lane(trace, "noise", [0.0, 1e-12], {})
    loud = lane(trace, "noise", [3e-5, 2e-5], {})
    lane(trace, "planes", [1.0, 1.0], {})
    assert noise_bound(trace, [quiet]) == 1e-9
    assert noise_bound(trace, [quiet, loud]) == pytest.approx(3e-4)


def test_a_divergence_names_its_round_and_the_rollback_before_it() -> None:
    trace = TraceStore()
    lane(trace, "other", [1.0] * 10, {0: 1})
    run_id = lane(trace, "planes", [0, 1e-10, 0, 0, 0, 0, 0, 1e-3, 0.9, 0], {1: 2, 3: 1, 4: 1})
    found = judge(trace, run_id, 1e-9)
    assert (found.lane, found.verdict, found.band) == ("planes", "suspect", "> 1e-4")
    assert found.is_beyond
    assert (found.first_pos, found.first_round, found.after_round) == (17, 3, 1)
    assert (found.n_forks, found.first_fork) == (1, 18)
    assert (found.worst_nmse, found.worst_pos, found.n_positions) == (0.9, 18, 10)
    assert (found.max_abs, found.max_kl) == (1.8, pytest.approx(2.7))
    assert found.duplicates == 4
    assert found.state_error is None


def test_a_divergence_without_a_rollback_before_it() -> None:
    trace = TraceStore()
    found = judge(trace, lane(trace, "planes", [0, 1, 0, 0], {0: 1, 1: 1}), 1e-9)
    assert (found.first_round, found.after_round) == (0, None)


def test_verdicts_against_the_bound() -> None:
    trace = TraceStore()
    run_id = lane(trace, "planes", [0.0, 1e-5], {})
    assert judge(trace, run_id, 1e-5).verdict == "within"
    assert judge(trace, run_id, 9e-6).verdict == "suspect"
    assert judge(trace, lane(trace, "ring", [0.0, 0.0], {}), 0.0).verdict == "exact"
    trace.runs[run_id]["lane_error"] = "full"
    failed = judge(trace, run_id, 1.0)
    assert (failed.verdict, failed.error, failed.is_beyond) == ("failed", "full", True)


def test_what_is_not_finite_is_beyond_any_bound() -> None:
    trace = TraceStore()
    found = judge(trace, lane(trace, "planes", [0.0, math.nan, 0.1, 0.0], {}), 1e9)
    assert (found.verdict, found.first_pos, found.worst_pos) == ("suspect", 11, 11)


def described(trace: TraceStore, name: str, nmse: list[float], kind: str, **facts: object) -> int:
    run_id = lane(trace, name, nmse, {})
    trace.runs[run_id] |= {"lane_kind": kind, "lane_against": 0, **facts}
    return run_id


def test_every_lane_is_judged_by_the_noise_of_its_own_leader() -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [1e-12, 1e-12], "noise")
    described(trace, "planes", [1e-5, 0], "policy")
    mode = described(trace, "reference,compute=int8", [0.3, 0], "reference")
    described(trace, "noise,compute=int8", [2e-5, 0], "noise", lane_against=mode)
    described(trace, "planes,compute=int8", [1e-4, 0], "policy", lane_against=mode)
    described(trace, "ring,compute=int8", [3e-4, 0], "policy", lane_against=mode)
    described(trace, "peer", [3e-4, 0], "peer")
    described(trace, "peer again", [3e-3, 0], "peer")
    described(trace, "noise,peer=1", [1e-4, 0], "peer noise")
    described(trace, "noise,peer=2", [2e-5, 0], "peer noise")
    described(trace, "peer of an older trace", [3e-2, 0], "peer", lane_tolerance=1e-2)
    found = judge_lanes(trace, range(len(trace.runs)))
    assert [v.verdict for v in found] == [
        "reference",
        "within",
        "suspect",
        "mode",
        "within",
        "within",
        "suspect",
        "agrees",
        "suspect",
        "within",
        "within",
        "suspect",
    ]
    assert [v.bound for v in found] == pytest.approx(
        [math.inf, 1e-9, 1e-9, math.inf, 2e-4, 2e-4, 2e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-2]
    )
    assert [v.is_beyond for v in found] == [v.verdict == "suspect" for v in found]
    bounded = judge_lanes(trace, range(len(trace.runs)), 2e-4)
    assert [v.verdict for v in bounded] == [
        "reference",
        "within",
        "within",
        "mode",
        "within",
        "within",
        "suspect",
        "suspect",
        "suspect",
        "within",
        "within",
        "suspect",
    ]


@pytest.mark.parametrize(
    ("noise", "bound"), [(0.0, 1e-9), (0.05, 0.5), (0.3, 1.0), (1.2, 1.2), (math.nan, 1e-9)]
)
def test_no_noise_explains_a_peer_whose_logits_are_unlike(noise: float, bound: float) -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    peer = described(trace, "peer", [bound, 1.5], "peer")
    described(trace, "noise,peer=1", [0.0, noise], "peer noise")
    (found,) = judge_lanes(trace, [peer])
    assert found.bound == pytest.approx(bound)
    assert (found.verdict, found.first_pos) == ("suspect", 11)


def test_a_mode_that_is_not_finite_is_suspect() -> None:
    trace = TraceStore()
    run = described(trace, "reference,compute=int8", [0.1, math.nan], "reference", lane_against=7)
    assert judge_lanes(trace, [run])[0].verdict == "suspect"


def test_a_fork_is_the_first_token_that_is_not_the_references() -> None:
    trace = TraceStore()
    run = described(trace, "ring,free", [0, 0, 0, 1e-12, 1e-12], "policy", lane_free=True)
    for i, expected in enumerate([5, 6, 7, 8, 9]):
        trace.divergence._array("token_id")[i] = expected
        trace.divergence._array("top2_gap")[i] = i / 8
    for i, token in enumerate([5, 6, 7, 3, 4]):
        trace.tokens.append(
            run_id=run, round=0, seq_id=0, pos=10 + i, kind="target", token_id=token
        )
    trace.tokens.append(run_id=run, round=0, seq_id=0, pos=11, kind="rejected", token_id=1)
    trace.rounds.append(run_id=run, round=0, seq_id=0, rollback_depth=2)
    fork = judge(trace, run, 1e-9).fork
    assert (fork.pos, fork.round, fork.after_round) == (13, 1, 0)
    assert (fork.token_id, fork.reference_id, fork.top2_gap) == (3, 8, 0.375)
    assert judge(trace, run, 1e-9).verdict == "forked"
    assert not judge(trace, run, 1e-9).is_beyond
    assert judge(trace, run, 1e-13).verdict == "suspect"


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
def test_no_mode_has_a_bound_but_what_was_measured_in_it(compute: str) -> None:
    trace = TraceStore()
    quiet = described(trace, "noise", [0.0, 0.0], "noise", compute=compute)
    assert noise_bound(trace, [quiet]) == 1e-9
    loud = described(trace, "noise again", [0.02, 0.0], "noise", compute=compute)
    assert noise_bound(trace, [quiet, loud]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("gap", "said", "temp", "verdict"),
    [
        (1.9e-3, {}, 0.0, "forked"),  # ten times the noise may move either of two logits
        (2.1e-3, {}, 0.0, "suspect"),
        (2.1e-3, {"follows": True}, 0.0, "suspect"),
        (2.1e-3, {"follows": True}, 0.8, "forked"),
        (2.1e-3, {"by_mode": True}, 0.0, "forked"),
        (1e-9, {"follows": False}, 0.0, "suspect"),
        (1e-9, {"follows": False}, 0.8, "suspect"),
        (1.9e-3, "of another kind", 0.0, "forked"),  # as a damaged file may have it
    ],
)
def test_a_fork_is_judged_by_its_gap_and_by_its_logits(gap, said, temp, verdict) -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [5e-5, 5e-5], "noise")  # the largest |difference| is twice as much
    options = {"sampler": {"temp": temp}}
    run = described(trace, "ring,free", [0.0, 0.0], "policy", lane_free=True, options=options)
    forks = [{"seq_id": 0, "pos": 10, **said}] if isinstance(said, dict) else said
    trace.runs[run]["lane_forks"] = forks
    trace.divergence._array("top2_gap")[len(trace.divergence) - 2] = gap
    trace.divergence._array("token_id")[len(trace.divergence) - 2] = 5
    trace.divergence._array("token_id")[len(trace.divergence) - 1] = 6
    trace.tokens.append(run_id=run, round=0, seq_id=0, pos=10, kind="target", token_id=7)
    found = judge_lanes(trace, [run])[0]
    assert (found.verdict, found.fork.explained) == (verdict, verdict == "forked")
    assert found.first_pos == (None if verdict == "forked" else 10)


def test_cells_that_differ_are_no_noise() -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [1e-3, 1e-3], "noise")
    run = described(trace, "checkpoint", [1e-3, 1e-3, 1e-3, 1e-3], "policy")
    assert judge_lanes(trace, [run])[0].verdict == "within"
    trace.divergence._array("cells_differ")[len(trace.divergence) - 1] = 2
    found = judge_lanes(trace, [run])[0]
    assert (found.verdict, found.first_round, found.first_pos) == ("suspect", 1, 13)


CHECK = {"ceiling": 0.2, "share": 0.25, "batches": []}


@pytest.mark.parametrize(
    ("n", "value", "verdict"), [(3, 1.6, "within"), (4, 1.6, "suspect"), (1, math.nan, "suspect")]
)
def test_ties_may_tip_a_few_rows_of_a_lane_that_they_tip_in_the_noise(
    n: int, value: float, verdict: str
) -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [0.9, *[0.01] * 9], "noise", noise_check=CHECK)
    described(trace, "checkpoint", [*[value] * n, *[0.01] * (10 - n)], "policy")
    assert [one.verdict for one in judge_lanes(trace, [2])] == [verdict]


@pytest.mark.parametrize(("n", "verdict"), [(3, "within"), (4, "suspect")])
def test_so_may_they_where_all_rows_of_the_noise_may_be_tipped(n: int, verdict: str) -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [1e-6] * 10, "noise", noise_check={**CHECK, "share": 1.0})
    described(trace, "replay", [*[1e-3] * n, *[0.0] * (10 - n)], "policy")
    assert [one.verdict for one in judge_lanes(trace, [2])] == [verdict]


@pytest.mark.parametrize(
    ("n", "worst", "first", "verdict"),
    [
        (3, 0.4, None, "within"),
        (4, 0.4, None, "suspect"),
        (3, 0.041, None, "within"),  # ten times that is less than UNLIKE, but more than these rows
        (4, 0.041, None, "suspect"),
        (3, 0.039, None, "suspect"),
        (3, None, None, "suspect"),  # it was not finite
        (3, 0.4, {"pos": 10, "row": 0, "width": 4}, "suspect"),  # that check failed
    ],
)
def test_so_may_they_where_they_tip_its_texts_decoded_afresh(
    n: int, worst: float | None, first: dict[str, Any] | None, verdict: str
) -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    batch = {"seq_id": 0, "rows": 10, "beyond": 0, "batches": "one batch", "worst": worst}
    check = {**CHECK, "share": 0.5, "batches": [{**batch, "first": first}]}
    described(trace, "noise", [1e-4] * 10, "noise", noise_check=check)
    described(trace, "checkpoint", [*[0.4] * n, *[0.0] * (10 - n)], "policy")
    assert [one.verdict for one in judge_lanes(trace, [2])] == [verdict]


def test_without_ties_a_single_row_beyond_the_bound_is_suspect() -> None:
    trace = TraceStore()
    described(trace, "reference", [], "reference", lane_against=None)
    described(trace, "noise", [1e-10] * 10, "noise", noise_check={**CHECK, "share": 0.0})
    described(trace, "checkpoint", [1.6, *[0.0] * 9], "policy")
    assert [one.verdict for one in judge_lanes(trace, [2])] == ["suspect"]


@pytest.mark.parametrize(
    ("types", "least"),
    [
        ({}, 1e-9),
        ({"gates": "bf16"}, 1e-9),
        ({"s": "f16"}, 32 * 2**-24),
        ({"s": "f16", "r": "bf16"}, 32 * 2**-18),
    ],
)
def test_states_in_a_shorter_type_are_rounded_at_other_tokens(
    types: dict[str, str], least: float
) -> None:
    trace = TraceStore()
    noise = described(trace, "noise", [1e-12] * 4, "noise", options={"state_types": types})
    assert noise_bound(trace, [noise]) == pytest.approx(least)


@pytest.mark.parametrize(
    ("mode", "ranks", "rounds_states", "share"),
    [
        ("f32", False, False, 0.0),
        ("f32", True, False, 0.25),
        ("int8", False, False, 0.25),
        ("int8", True, False, 0.5),
        ("bf16", True, True, 1.0),
        ("bf16", False, True, 0.25),
    ],
)
def test_how_many_rows_ties_may_tip(
    mode: str, ranks: bool, rounds_states: bool, share: float
) -> None:
    assert tipped_share(mode, ranks=ranks, rounds_states=rounds_states) == share
