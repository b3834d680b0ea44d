"""Texts as people paste them into a thread: lists under a line, names that mean something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import TraceFileError
from tests.engine.observe.files.pasted_text import imported, read, rules

COUNTS = "draft_n_accepted", "draft_n"


def test_counts_of_a_list_are_of_what_the_line_above_says(tmp_path: Path) -> None:
    text = "The accept rates are the same:\n- old: 81.7 t/s (304 / 374 = 81.28%)\n"
    text += "* new: 84.4 t/s (303/373 = 81.23%)\n\nHumanEval after that\n- 82 / 164 = 50.00%\n"
    told = [one["told"] for one in read(text, tmp_path).runs[0]["requests"]]
    assert [[one[name] for name in COUNTS] for one in told] == [[304, 374], [303, 373]]
    assert [one["predicted_per_second"] for one in told] == [81.7, 84.4]


def test_names_and_counts_in_code_marks(tmp_path: Path) -> None:
    line = "- after it: `draft_attempts_total=1304`, `accepts_total=1111` → **85.2% acceptance**\n"
    store = imported(tmp_path, line)
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [1111, 1304]
    assert not rules(store)  # nothing of the line is left


@pytest.mark.parametrize("name", ["acc", "Acc"])
def test_the_accuracy_of_answers_is_not_an_acceptance(tmp_path: Path, name: str) -> None:
    table = "|Tasks|Version|n-shot|Metric|   |Value |   |Stderr|\n|-|-|-|-|-|-|-|-|\n"
    table += f"|gsm8k|3|5|{name}|↑|0.8400|±|0.0101|\n"
    with pytest.raises(TraceFileError):
        imported(tmp_path, table)


@pytest.mark.parametrize(("last", "is_whole"), [("0.396", True), ("...", False)])
def test_shares_in_one_cell_are_all_if_they_make_the_length(
    tmp_path: Path, last: str, is_whole: bool
) -> None:
    table = "| run | acceptance length | per-position |\n|-|-|-|\n"
    table += f"| a | 3.42 | 0.861, 0.652, 0.511, {last} |\n"
    (told,) = (one["told"] for one in imported(tmp_path, table).runs[0]["requests"])
    assert told["mean_acceptance_length"] == 3.42
    by = told["acceptance_per_position"]
    assert (by["unconditional"] if by else by) == (
        [0.861, 0.652, 0.511, 0.396] if is_whole else None
    )


def test_the_output_throughput_of_a_benchmark_is_a_speed(tmp_path: Path) -> None:
    saved = {"spec_decode_draft_tokens": 200, "spec_decode_accepted_tokens": 120}
    saved |= {"request_throughput": 2.5, "output_throughput": 671.48, "total_token_throughput": 900}
    (told,) = (one["told"] for one in read(json.dumps(saved), tmp_path).runs[0]["requests"])
    assert told["predicted_per_second"] == 671.48


def test_a_log_read_from_a_picture_has_lost_blanks(tmp_path: Path) -> None:
    text = """slot print_timing: id 0 | task 12 | prompt eval time = 640.20ms / 512 tokens (1.25 ms)
slot print_timing: id 0 | task 12 | eval time=5000.00ms / 250tokens ( 20.00 ms per token)
slot print_timing: id 0 | task 12 | draft acceptance rate=0.71429 (250accepted/350generated)
"""
    (told,) = (one["told"] for one in imported(tmp_path, text).runs[0]["requests"])
    assert [told[name] for name in ("predicted_n", *COUNTS)] == [250, 250, 350]
    assert (told["prompt_n"], told["predicted_ms"]) == (512, 5000.0)


def test_counts_that_make_another_rate_are_not_those_of_the_drafts(tmp_path: Path) -> None:
    text = "Chain 1: Iteration 2000/2000 [100%]  Acceptance rate: 0.234 of the proposals\n"
    with pytest.raises(TraceFileError):
        imported(tmp_path, text)


def test_the_leaderboard_of_spec_bench(tmp_path: Path) -> None:
    table = "| Models | QA | #Mean Accepted Tokens | Overall |\n|-|-|-|-|\n"
    table += "| Medusa | 1.71x | 2.39 | 1.94x |\n"
    (one,) = read(table, tmp_path).runs[0]["requests"]
    assert (one["place"], one["told"]["mean_acceptance_length"]) == ("Medusa", 2.39)


def test_counts_that_a_console_calls_sd(tmp_path: Path) -> None:
    line = " -- SD accepted tokens: 180, SD proposed tokens: 240\n"
    (told,) = (one["told"] for one in imported(tmp_path, line).runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [180, 240]


def test_lines_of_a_benchmark_with_and_without_drafts(tmp_path: Path) -> None:
    lines = [
        {"backend": "sglang", "output_throughput": speed, "accept_length": length}
        for speed, length in ((512.5, 2.87), (312.5, None))
    ]
    store = read("\n".join(map(json.dumps, lines)), tmp_path)
    names = "predicted_per_second", "mean_acceptance_length"
    told = [[one["told"][name] for name in names] for one in store.runs[0]["requests"]]
    assert told == [[512.5, 2.87], [312.5, None]]
    assert store.runs[0]["source"]["engine"] == "sglang"


def test_counts_with_signs_between_thousands_are_no_names(tmp_path: Path) -> None:
    table = (
        "| Metric | MTP 1 | MTP 2 | Δ |\n|-|-|-|-|\n| Acceptance rate (%) | 80.00 | 60.00 | -20 |\n"
    )
    table += "| Draft tokens | 246,000 | 400,000 | +62.6% |\n"
    table += (
        "| Accepted tokens | 196,800 | 240,000 | +22.0% |\n| Median TTFT | 3 | 4 | +1 (worse) |\n"
    )
    told = [one["told"] for one in read(table, tmp_path).runs[0]["requests"]]
    assert [[one[name] for name in COUNTS] for one in told] == [[196800, 246000], [240000, 400000]]


def test_replies_with_the_same_counts_are_two_if_the_second_was_faster(tmp_path: Path) -> None:
    plain = {"prompt_n": 10, "prompt_ms": 50.0, "predicted_n": 64, "predicted_ms": 1600.0}
    drafted = plain | {"predicted_ms": 900.0, "draft_n": 60, "draft_n_accepted": 41}
    lines = [json.dumps({"timings": one}) for one in (plain, drafted)]
    told = [one["told"] for one in read("\n".join(lines), tmp_path).runs[0]["requests"]]
    assert [one.get("draft_n") for one in told] == [None, 60]
    assert [one["predicted_ms"] for one in told] == [1600.0, 900.0]


def test_counts_in_a_sentence_of_another_language(tmp_path: Path) -> None:
    text = "投機的デコード: ドラフト 400 トークン中 300 トークン受理 (受理率 75.0%)、42.1 tok/s\n"
    (told,) = (one["told"] for one in read(text, tmp_path).runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [300, 400]
