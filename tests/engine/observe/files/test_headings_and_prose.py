"""Figures that only a heading, or a sentence, gives a meaning to."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import TraceFileError
from tests.engine.observe.files.pasted_text import imported, read, rules

MEAN, RATE, SPEED = "mean_acceptance_length", "draft_acceptance_rate", "predicted_per_second"


def figures(text: str, tmp_path: Path, name: str) -> dict[str, float | None]:
    """A figure of each request, by its place."""
    requests = read(text, tmp_path).runs[0]["requests"]
    assert {one["told"].get("draft_n") for one in requests} == {None}
    return {one["place"]: one["told"].get(name) for one in requests}


TABLE = """
| task | EAGLE-3 | MTP |
|---|---|---|
| code | 3.41 | **2.95** |
| prose | 2.07 | 1.88 |
| overall | 2.74 | 2.42 |
"""


@pytest.mark.parametrize(
    "heading",
    [
        "## Acceptance length\n",
        "## 2. Mean acceptance length by task\n\nSome words.\n\n### A 27B model, both drafters\n",
        "**Average accept length (tokens per verify step)**\n",
        "Mean acceptance length by task:\n",
    ],
)
def test_a_heading_says_what_all_numbers_are(tmp_path: Path, heading: str) -> None:
    found = figures(heading + TABLE, tmp_path, MEAN)
    assert found == {
        "code, eagle-3": 3.41,
        "code, mtp": 2.95,
        "prose, eagle-3": 2.07,
        "prose, mtp": 1.88,
    }


def test_shares_below_a_heading_with_a_percent_sign(tmp_path: Path) -> None:
    text = "### Acceptance rate (%)\n\n| task | n=1 | n=2 |\n|-|-|-|\n| code | 91.0 | 84 |\n"
    assert figures(text, tmp_path, RATE) == {"code, n=1": 0.91, "code, n=2": 0.84}
    text = "### Acceptance rate\n\n| task | n=1 |\n|-|-|\n| code | 0.91 |\n| prose | n/a |\n"
    assert figures(text, tmp_path, RATE) == {"code": 0.91}


@pytest.mark.parametrize(
    "text",
    [
        "## Acceptance length\n\n### Accuracy\n" + TABLE,
        "## Acceptance length\n\n## Results\n" + TABLE,
        "Mean acceptance length:\n\nThat was before.\n" + TABLE,
        "## Expected acceptance rate\n\n| task | a | b |\n|-|-|-|\n| code | 0.5 | 0.6 |\n",
        "## Acceptance rate by depth\n\n| task | 1 | 2 |\n|-|-|-|\n| code | 0.5 | 0.6 |\n",
        "## Acceptance length\n\n| task | pos 1 | pos 2 |\n|-|-|-|\n| code | 1.5 | 1.6 |\n",
        "## Acceptance length\n\n| task | time (s) | speedup |\n|-|-|-|\n| code | 1.5 | 1.6 |\n",
        "## Acceptance rate\n\n| task | a | b |\n|-|-|-|\n| code | 2.41 | 2.95 |\n",
        "## Acceptance length\n\n| task | a | b |\n|-|-|-|\n| code | 128 | 256 |\n",
    ],
)
def test_a_heading_says_nothing_of_other_numbers(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceFileError):
        imported(tmp_path, text)


@pytest.mark.parametrize(
    "line",
    [
        "With the drafter 2.25 of 5 accepted per round.",
        "speculative: 2.25 of 5 drafted tokens were accepted per step",
        "The MTP head accepts 2.25 of 5 tokens per cycle",
    ],
)
def test_tokens_accepted_in_a_round_are_a_length(tmp_path: Path, line: str) -> None:
    assert figures(f"{line}\n", tmp_path, MEAN) == {"line 1": 3.25}


def test_the_decimals_of_a_number_are_no_count(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError):
        imported(tmp_path, "speculative decoding: 3.2 of 7 drafted tokens accepted\n")


@pytest.mark.parametrize(
    "line", ["draft 采纳率 ~72%", "投机解码采纳率约 72%", "MTP 接受率：0.72", "MTP 採択率は 72%"]
)
def test_a_rate_in_a_sentence_without_spaces(tmp_path: Path, line: str) -> None:
    assert figures(f"{line}，38.5 tok/s\n", tmp_path, RATE) == {"line 1": 0.72}
    assert figures(f"{line}，38.5 tok/s\n", tmp_path, SPEED) == {"line 1": 38.5}


def test_a_rate_that_is_about_a_number(tmp_path: Path) -> None:
    table = "| 模型 | 采纳率 | tok/s |\n|-|-|-|\n| a | ~ 81% | 58.5 |\n| b | ≈ 72 % | 98.0 |\n"
    assert list(figures(table, tmp_path, RATE).values()) == [0.81, 0.72]


def test_a_row_whose_rate_is_a_word_and_a_number_is_not_the_one_without(tmp_path: Path) -> None:
    table = "| model | acceptance | tok/s |\n|-|-|-|\n| a | 81% | 38.5 |\n| b | about 72% | 98 |\n"
    assert rules(imported(tmp_path, table)) == ["log-unread"]


def test_a_mean_next_to_its_deviation_by_a_short_name(tmp_path: Path) -> None:
    table = "| task | runs | tok/s mean/std | rate mean/std | a.len mean/std |\n|-|-|-|-|-|\n"
    table += "| code | 5 | 37.25/1.48 | 92.50%/1.84% | 3.75/0.06 |\n"
    assert figures(table, tmp_path, MEAN) == {"code": 3.75}


def test_speeds_of_all_engines_of_vllm_together(tmp_path: Path) -> None:
    line = "(APIServer pid=1) INFO 09-01 10:00:10 [{}.py:9] {}\n"
    speed = "4 Engines Aggregated: Avg prompt throughput: 120.5 tokens/s, Avg generation "
    text = line.format("loggers", f"{speed}throughput: 812.5 tokens/s, Running: 16 reqs")
    sums = "SpecDecoding metrics: Mean acceptance length: 1.80, Accepted: 800 tokens, Drafted: "
    text += line.format("metrics", f"{sums}1000 tokens, Avg Draft acceptance rate: 80.0%")
    (one,) = read(text, tmp_path).runs[0]["requests"]
    assert (one["told"]["draft_n"], one["told"][SPEED]) == (1000, 812.5)


def test_times_of_two_models_are_of_no_request(tmp_path: Path) -> None:
    times = "llama_print_timings:        eval time =     322.80 ms /   216 runs   (    1.49 ms per "
    times += "token,   669.15 tokens per second)\nllama_print_timings:       total time = 9 ms\n"
    with pytest.raises(TraceFileError):
        imported(tmp_path, f"draft:\n\n{times}\ntarget:\n\n{times}")
    assert len(read(times, tmp_path).runs[0]["requests"]) == 1
