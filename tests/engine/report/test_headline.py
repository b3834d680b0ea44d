"""The figures of a run in three lines: what each says, and what is left out where not known."""

from __future__ import annotations

from typing import Any

from engine.report.run import figure_lines

SUMS: dict[str, Any] = {
    "predicted_n": 40,
    "predicted_per_second": 159.6,
    "draft_n": 31,
    "draft_n_accepted": 28,
    "draft_acceptance_rate": 28 / 31,
    "mean_acceptance_length": 1 + 28 / 11,
}


def test_a_speculative_run() -> None:
    totals = {
        **SUMS,
        "cache_n": 3,
        "prompt_n": 10,
        "prompt_ms": 75.1,
        "phase_ms": {"draft": 138.3, "verify": 95.0, "rollback": 0.3, "restore": 0.0},
        "acceptance_per_position": {"conditional": [1.0, 0.8182, None]},
        "rollback_depth_histogram": [9, 0, 2],
    }
    assert list(figure_lines(totals)) == [
        "40 tokens, 159.6 tokens/s; 28 of 31 drafted tokens accepted (0.903), mean length 3.55",
        "prompt: 10 tokens in 75 ms, 3 from the cache; rounds: draft 138 ms, verify 95 ms",
        "acceptance by position, if reached: 1.00 0.82 -; rollback depth (rounds): 0 (9) 2 (2)",
    ]


def test_a_plain_run() -> None:
    totals = {"predicted_n": 2, "predicted_per_second": None, "prompt_n": 4, "prompt_ms": 5.0}
    assert list(figure_lines(totals)) == [
        "2 tokens",
        "prompt: 4 tokens in 5 ms",
        "drafts: none, plain decoding",
    ]


def test_a_run_of_which_no_figure_is_known() -> None:
    totals = {"predicted_n": None, "predicted_per_second": None}
    assert list(figure_lines(totals)) == ["tokens not known"]


def test_drafts_that_were_not_observed_are_not_said_to_be_none() -> None:
    totals = {"predicted_n": 2, "predicted_per_second": None, "num_draft_tokens": None}
    assert list(figure_lines(totals)) == ["2 tokens"]


def test_long_drafts_are_cut() -> None:
    totals = {**SUMS, "acceptance_per_position": {"conditional": [0.5] * 9}}
    assert list(figure_lines(totals))[1:] == [f"acceptance by position, if reached: {'0.50 ' * 8}…"]


def test_what_is_not_known_is_left_out() -> None:
    totals = {**SUMS, "phase_ms": None, "acceptance_per_position": None}
    assert len(list(figure_lines(totals))) == 1
