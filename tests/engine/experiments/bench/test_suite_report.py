"""A suite's figures against sums done by hand and a slow way of counting."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.bench_suite import row_line, suite_lines
from engine.experiments.bench.request import Configuration, round_costs
from engine.experiments.bench.suite_report import aggregate_requests, options_of, suite_report
from engine.options import RunOptions, SpecOptions
from tests.support.request_results import made_up

PLAIN = Configuration.plain(RunOptions(n_predict=11))
MTP = Configuration("draft-mtp", RunOptions(n_predict=11, spec=SpecOptions(("draft-mtp",))))


def small_report() -> dict:
    """Two prompts: 10 ms a plain token; 4 rounds of 15 ms with 8 of 12 drafted accepted, then
    10 rounds of 12 ms in which nothing was accepted."""
    done = {
        "plain": [made_up("fox", "plain"), made_up("a_long_name", "plain")],
        "draft-mtp": [
            made_up(
                "fox",
                "draft-mtp",
                predicted_ms=60.0,
                draft_n=12,
                draft_n_accepted=8,
                num_spec_steps=4,
                num_rounds=4,
                draft_ms=12.0,
                verify_ms=40.0,
                wall_s=0.062,
            ),
            made_up(
                "a_long_name",
                "draft-mtp",
                predicted_ms=120.0,
                draft_n=30,
                draft_n_accepted=0,
                num_spec_steps=10,
                num_rounds=10,
                draft_ms=30.0,
                verify_ms=80.0,
                wall_s=0.131,
                tokens=(1, 2, 4),
            ),
        ],
    }
    return {"complete": True, "configurations": suite_report(options_of([PLAIN, MTP]), done)}


def test_the_table_is_as_written_by_hand() -> None:
    lines = list(suite_lines(small_report()))
    assert lines == [
        "",
        "plain:",
        (
            "fox                pred=  11 draft=   0 acc=   0 rate=  n/a tok/s= 100.0 "
            "speed-up= 1.00 same=yes"
        ),
        (
            "a_long_name        pred=  11 draft=   0 acc=   0 rate=  n/a tok/s= 100.0 "
            "speed-up= 1.00 same=yes"
        ),
        (
            'Aggregate: {"n_requests": 2, "total_predicted": 22, "total_draft": 0, '
            '"total_draft_accepted": 0, "aggregate_accept_rate": null, "wall_s_total": 0.2}'
        ),
        "",
        "draft-mtp:",
        (
            "fox                pred=  11 draft=  12 acc=   8 rate=0.667 tok/s= 166.7 "
            "speed-up= 1.67 same=yes"
        ),
        (
            "a_long_name        pred=  11 draft=  30 acc=   0 rate=0.000 tok/s=  83.3 "
            "speed-up= 0.83 same=NO"
        ),
        (
            'Aggregate: {"n_requests": 2, "total_predicted": 22, "total_draft": 42, '
            '"total_draft_accepted": 8, "aggregate_accept_rate": 0.1905, "wall_s_total": 0.19}'
        ),
        (
            "1.43 tokens per round of 12.86 ms: drafting 3.00, verifying 8.57, rest 1.29; "
            "a plain step takes 10.00 ms"
        ),
        (
            "break-even at 1.29 tokens per round, an acceptance of 0.095; measured 0.191: "
            "faster than plain decoding"
        ),
        "some texts differ from plain decoding: `draftscope match` shows where",
        "",
        "configuration     tok/s  speed-up    rate  tokens/round   wall s     same",
        "plain             100.0      1.00     n/a          1.00     0.20      2/2",
        "draft-mtp         111.1      1.11   0.191          1.43     0.19      1/2",
    ]


def test_a_drafter_that_cannot_pay_is_told_why() -> None:
    plain = [made_up("fox", "plain")]
    slow = [
        made_up(
            "fox",
            "draft-mtp",
            predicted_ms=400.0,
            draft_n=10,
            draft_n_accepted=5,
            num_spec_steps=5,
            num_rounds=5,
            draft_ms=300.0,
        )
    ]
    report = suite_report(options_of([PLAIN, MTP]), {"plain": plain, "draft-mtp": slow})
    # 80 ms a round are 8 plain tokens: 7 accepted of 2 drafted
    assert report[1]["split"]["break_even_acceptance"] == pytest.approx(3.5)
    (line,) = (
        line
        for line in suite_lines({"complete": True, "configurations": report})
        if line.startswith("break-even at")
    )
    assert "3.500, impossible with this draft length" in line
    assert line.endswith("slower than plain decoding")


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 90), st.integers(0, 90), st.floats(0, 50)),
        max_size=6,
    )
)
def test_aggregates_are_sums(figures: list[tuple[int, int, int, float]]) -> None:
    requests = [
        made_up(f"p{i}", "x", predicted_n=n, draft_n=a + b, draft_n_accepted=a, wall_s=wall)
        for i, (n, a, b, wall) in enumerate(figures)
    ]
    counted = dict.fromkeys(("n", "pred", "draft", "acc"), 0)
    wall_s = 0.0
    for n, a, b, wall in figures:
        counted["n"] += 1
        counted["pred"] += n
        counted["draft"] += a + b
        counted["acc"] += a
        wall_s += wall
    rate = None
    if counted["draft"]:
        rate = float(f"{counted['acc'] / counted['draft']:.4f}")
    assert aggregate_requests(requests) == {
        "n_requests": counted["n"],
        "total_predicted": counted["pred"],
        "total_draft": counted["draft"],
        "total_draft_accepted": counted["acc"],
        "aggregate_accept_rate": rate,
        "wall_s_total": pytest.approx(wall_s, abs=0.006),
    }


@given(st.integers(1, 30), st.integers(1, 3), st.floats(1, 100), st.floats(1, 100))
def test_the_break_even_acceptance_breaks_even(
    rounds: int, drafted: int, round_ms: float, step_ms: float
) -> None:
    plain = [made_up("p", "plain", predicted_n=101, predicted_ms=100 * step_ms)]
    one = made_up(
        "p",
        "x",
        num_rounds=rounds,
        predicted_n=rounds + 1,
        predicted_ms=rounds * round_ms,
        draft_n=rounds * drafted,
    )
    facts = round_costs([one], plain)
    assert facts is not None
    # with that acceptance, a round emits as much as plain decoding does in its time
    emitted = 1 + facts["break_even_acceptance"] * drafted
    assert emitted / round_ms == pytest.approx(1 / step_ms)
    assert facts["draft_ms"] + facts["verify_ms"] + facts["rest_ms"] == pytest.approx(round_ms)


def test_requests_of_one_token_have_no_speed() -> None:
    plain, other = made_up("p", "plain", predicted_n=1), made_up("p", "draft-mtp", predicted_n=1)
    report = suite_report(options_of([PLAIN, MTP]), {"plain": [plain], "draft-mtp": [other]})
    assert report[1]["speed_up"] is None
    assert report[1]["tokens_per_second"] is None
    assert row_line(report[1]["rows"][0]).endswith("tok/s=   0.0 speed-up=  n/a same=yes")
    assert list(suite_lines({"complete": True, "configurations": report}))


def test_without_its_plain_request_a_row_has_no_comparison() -> None:
    done = {"plain": [], "draft-mtp": [made_up("p", "draft-mtp")]}
    report = suite_report(options_of([PLAIN, MTP]), done)
    row = report[1]["rows"][0]
    assert (row["speed_up"], row["same"], report[1]["split"]) == (None, None, None)
    lines = list(suite_lines({"complete": False, "configurations": report}))
    assert any(line.endswith("speed-up=  n/a same=n/a") for line in lines)
    assert lines[-1] == "not complete: the suite was stopped"
    json.dumps(report, allow_nan=False)
