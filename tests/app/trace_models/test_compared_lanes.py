"""What the lanes of a trace come to, against the rows written by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from app.panels.divergence.state_map import LogAxis
from app.trace_models.compared_lanes import ComparedLanes, lanes_of, run_to_show
from app.trace_models.position_detail import detail_rows
from app.trace_models.shown_text import error_text
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.lane_traces import CLEAN, NOISE, LaneBuilder, faulty_comparison


def ids(runs: tuple[RunRef, ...]) -> tuple[int, ...]:
    return tuple(run.run_id for run in runs)


def test_lanes_are_the_runs_between_two_reference_lanes() -> None:
    store = TraceStore()
    store.begin_run({})
    first = LaneBuilder(store)
    first.lane("noise", NOISE)
    first.lane("planes", CLEAN)
    LaneBuilder(store).lane("ring", CLEAN)
    store.begin_run({})
    assert [ids(lanes_of(RunRef(store, run))) for run in range(7)] == [
        (),
        (1, 2, 3),
        (1, 2, 3),
        (1, 2, 3),
        (4, 5),
        (4, 5),
        (),
    ]
    assert [run_to_show(RunRef(store, run)).run_id for run in (0, 1, 2, 4, 6)] == [0, 3, 3, 5, 6]


def test_rows_are_found_by_run_and_sequence_as_they_come() -> None:
    store = TraceStore()
    builder = LaneBuilder(store)
    builder.lane("planes", CLEAN)
    store.begin_run({})
    lanes = ComparedLanes(store, (0, 1))
    assert not lanes.poll()
    rounds, tokens = len(lanes.rounds(1, "round")), store.tokens
    for run_id, seq_id in ((1, 0), (2, 0), (1, 3), (1, 0)):
        tokens.append(run_id=run_id, seq_id=seq_id, round=9)
        store.rounds.append(run_id=run_id, seq_id=seq_id, round=len(store.rounds))
    assert lanes.poll()
    assert lanes.seq_ids == [0, 3]
    assert len(lanes.rounds(1, "round")) == rounds + 2
    assert ComparedLanes(store, (0, 1), 3).rounds(1, "round").size == 1
    store.rounds.append(run_id=2, seq_id=0, round=5)
    assert not lanes.poll(), "a run of somebody else"


def test_verdicts_bounds_and_positions_beyond() -> None:
    lanes = ComparedLanes(faulty_comparison().store, (0, 1, 2, 3))
    assert [lanes.verdicts[run].verdict for run in range(4)] == [
        "reference",
        "within",
        "within",
        "suspect",
    ]
    assert lanes.bounds[3] == 1e-9, "ten times the noise is less than the least bound"
    assert lanes.beyond(3).tolist() == [14, 15, 17]
    assert lanes.beyond(2).tolist() == []
    assert lanes.verdicts[3].after_round == 1
    assert lanes.is_over and lanes.n_predict == 8
    assert lanes.positions().tolist() == list(range(10, 18))
    assert lanes.round_at(3, 14) == 2 and lanes.round_at(3, 18) is None
    assert lanes.first_pos_of_round(0, 1) == 11 == lanes.first_pos_of_round(3, 1)


def test_new_rows_change_verdicts() -> None:
    builder = LaneBuilder()
    noise, planes = builder.lane("noise", ()), builder.lane("planes", ())
    lanes = ComparedLanes(builder.store, (0, noise, planes))
    assert not lanes.poll()
    builder.row(planes, "planes", 0, 1e-6)
    assert lanes.poll()
    assert lanes.verdicts[planes].verdict == "suspect"
    builder.row(noise, "noise", 0, 1e-5)
    assert lanes.poll()
    assert lanes.verdicts[planes].verdict == "within", "the noise explains it"
    assert lanes.bounds[planes] == pytest.approx(1e-4)


def test_a_peer_has_noise_of_its_own() -> None:
    builder = LaneBuilder()
    noise, planes = builder.lane("noise", NOISE), builder.lane("planes", CLEAN)
    peer, rounded = builder.lane("peer", [1e-3]), builder.lane("noise,peer=1", [2e-3])
    lanes = ComparedLanes(builder.store, (0, noise, planes, peer, rounded))
    lanes.poll()
    found = {run: lanes.noise_of(run) for run in range(5)}
    assert found == {0: [], noise: [noise], planes: [noise], peer: [rounded], rounded: [rounded]}
    assert lanes.bounds[peer] == pytest.approx(2e-2) and lanes.bounds[planes] == 1e-9
    assert lanes.is_noise(rounded) and not lanes.is_noise(peer)
    assert run_to_show(RunRef(builder.store, 0)).run_id == planes


def test_values_of_one_position() -> None:
    lanes = ComparedLanes(faulty_comparison().store, (0, 1, 2, 3))
    assert lanes.measure(3, "max_abs", 15) == 0.5
    assert lanes.measure(3, "rank", 15) == 2
    assert lanes.measure(3, "state_error", 14) == 1.0, "measured after the round, at 16"
    assert lanes.measure(1, "state_error", 14) is None
    assert lanes.measure(3, "nmse", 99) is None
    assert lanes.tops(3, 15) == [
        (7, pytest.approx(0.46)),
        (5, pytest.approx(0.22)),
        (6, pytest.approx(0.1)),
    ]
    assert lanes.tops(0, 15) == [(5, 0.5), (6, 0.25)]
    assert lanes.tops(0, 99) is None
    assert lanes.token_at(15) == 5
    assert lanes.text(5) == "⟨newline⟩"


def test_one_position_of_all_lanes_is_aligned_by_token() -> None:
    rows = detail_rows(ComparedLanes(faulty_comparison().store, (0, 1, 2, 3)), 15)
    tokens = {label: cells for label, _, cells in rows[:3]}
    order = ["› ⟨newline⟩", " return", " y"]
    assert list(tokens) == order, "by the reference's probability, the chosen one marked"
    cells = tokens["› ⟨newline⟩"]
    assert [cell.text for cell in cells] == ["0.500", "0.500", "0.500", "▼ 0.220"]
    assert [cell.differs for cell in cells] == [False, False, False, True]
    assert [cell.best for cell in cells] == [True, True, True, False]
    assert [cell.text for cell in tokens[" y"]] == ["below 2"] * 3 + ["▲ 0.460"]
    measures = {label: [cell.text for cell in cells] for label, _, cells in rows[3:]}
    assert measures["NMSE"] == ["–", "4.0e-12", "1.0e-12", "✗ 0.25"]
    assert measures["top-1"] == ["–", "same", "same", "≠ other"]
    assert measures["state"] == ["–", "not recorded", "1.0e-07", "1"]
    assert measures["cells"] == ["–", "not recorded", "exact", "exact"]


def test_what_a_lane_does_not_have_is_said() -> None:
    builder = LaneBuilder()
    builder.lane("noise", NOISE)
    builder.lane("planes", CLEAN[:4], record=False)
    builder.lane("ring", [math.nan] * 8)
    found = detail_rows(ComparedLanes(builder.store, (0, 1, 2, 3)), 15)
    rows = {label: cells for label, _, cells in found}
    assert rows["› ⟨newline⟩"][2].text == "not recorded"
    assert rows["NMSE"][2].text == "not recorded"
    assert rows["NMSE"][3].text == "✗ not finite"
    assert rows["NMSE"][3].differs


def test_a_small_probability_is_no_zero() -> None:
    builder = LaneBuilder()
    builder.lane("planes", [0.0] * 8, tops={12: [(7, 0.9), (5, 0.00034), (6, 0.0)]})
    cells = [cells[-1] for *_, cells in detail_rows(ComparedLanes(builder.store, (0, 1)), 12)]
    assert {cell.text.split()[-1] for cell in cells if cell.bar is not None} == {
        *("0.900", "3.4e-4", "0.000")
    }


def test_an_opened_trace_gives_the_same(tmp_path: Path) -> None:
    store = faulty_comparison().store
    export_csv(store, tmp_path / "out")
    one, two = (ComparedLanes(s, (0, 1, 2, 3)) for s in (store, open_trace(tmp_path / "out")))
    for run_id, verdict in one.verdicts.items():
        again = two.verdicts[run_id]
        assert (again.verdict, again.first_pos) == (verdict.verdict, verdict.first_pos)
        assert again.worst_nmse == pytest.approx(verdict.worst_nmse)
    for pos in range(10, 18):
        assert detail_rows(two, pos) == detail_rows(one, pos)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "exact"),
        (1.26e-13, "1.3e-13"),
        (0.25, "0.25"),
        (1234.0, "1.2e+03"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
    ],
)
def test_errors_are_short_and_zero_is_exact(value: float | None, text: str) -> None:
    assert error_text(value) == text


def test_zero_and_nan_have_a_place_on_the_log_axis() -> None:
    values = np.array([0.0, 2e-13, 3e-4, math.nan, math.inf])
    axis = LogAxis.over(values)
    assert (axis.low, axis.high) == (-13, -3)
    y = axis.y(values)
    assert y[1] == pytest.approx(math.log10(2e-13))
    assert y[2] == pytest.approx(math.log10(3e-4))
    bottom, top = axis.y_range
    assert bottom < axis.marks < y[0] < axis.low <= y[1] < y[2] <= axis.high < y[3] < top
    assert y[3] == y[4]
    labels = dict(axis.ticks(values))
    assert labels[y[0]] == "exact" and labels[y[3]] == "not finite"
    assert labels[-3.0] == "1e-3"
    assert "not finite" not in dict(axis.ticks(values[:3])).values()


@pytest.mark.parametrize("gap", [0.5, 2.5, 6.0])
def test_labels_of_a_low_axis_keep_their_distance(gap: float) -> None:
    values = np.array([0.0, 2e-13, 3e1, math.nan])
    ticks = LogAxis.over(values).ticks(values, gap)
    heights = sorted(y for y, _ in ticks)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= gap
    assert {"exact", "not finite"} <= {text for _, text in ticks}


def test_an_axis_over_nothing_still_has_decades() -> None:
    axis = LogAxis.over(np.zeros(3))
    assert axis.high - axis.low >= 2
    assert axis.y(np.zeros(1))[0] == axis.exact
