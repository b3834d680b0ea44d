"""Answers that the evaluations of EAGLE and Spec-Bench keep, and what their scripts print."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine.trace.store import TraceStore
from tests.engine.observe.files.pasted_text import imported, rules

ACCEPTED = "num_accepted_draft_tokens"
PRINTED = """============================== Task:  {} ==============================
#Mean accepted tokens:  {}
Tokens per second: {}{}{}
Tokens per second{}: {}41.5
Speedup ratio:  2.4
"""


def _line(question: int, **choice: Any) -> str:
    turns = ["text"] * len(choice["new_tokens"])
    return json.dumps(
        {
            "question_id": question,
            "category": "writing",
            "answer_id": "x",
            "model_id": "some-head",
            "choices": [{"index": 0, "turns": turns, **choice}],
            "tstamp": 1.5,
        }
    )


def _told(store: TraceStore) -> list[dict[str, Any]]:
    return [one["told"] for one in store.runs[0]["requests"]]


def test_answers_of_eagle_have_the_index_of_the_last_step(tmp_path: Path) -> None:
    lines = [
        _line(81, idxs=[99, 49], new_tokens=[300, 170], wall_time=[3.0, 1.7]),
        _line(82, idxs=[9], new_tokens=[10], wall_time=[0.5]),
    ]
    store = imported(tmp_path, "\n".join(lines))
    first, plain = _told(store)
    assert [first[name] for name in ("predicted_n", "num_spec_steps", ACCEPTED)] == [470, 150, 320]
    assert first["predicted_per_second"] == pytest.approx(100)
    assert first["num_draft_tokens"] is None
    # a token in each step: without drafts, as far as is known
    assert [plain[name] for name in ("predicted_n", "num_spec_steps", ACCEPTED)] == [10, None, None]
    assert [one["place"] for one in store.runs[0]["requests"]] == ["writing 81", "writing 82"]
    assert not rules(store)


@pytest.mark.parametrize(
    "choice",
    [
        {"idxs": [9], "new_tokens": [30, 40], "wall_time": [1.0, 1.0]},
        {"idxs": [9, 8], "new_tokens": [30, 40], "wall_time": [1.0]},
        {"decoding_steps": [3], "accept_lengths": [3] * 5, "new_tokens": [8, 7], "wall_time": [1]},
    ],
)
def test_lists_of_different_numbers_of_turns_contradict(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    store = imported(tmp_path, _line(81, **choice))
    assert _told(store) == [{}]
    assert rules(store) == ["counters-contradict"]


def test_answers_of_spec_bench_have_the_tokens_of_each_step(tmp_path: Path) -> None:
    line = _line(
        81,
        decoding_steps=[3, 2],
        new_tokens=[7, 6],
        wall_time=[0.1, 0.1],
        accept_lengths=[4, 1, 2, 3, 3],
    )
    (told,) = _told(imported(tmp_path, line))
    assert [told[name] for name in ("predicted_n", "num_spec_steps", ACCEPTED)] == [13, 5, 8]
    assert told["acceptance_histogram"] == [1, 1, 2, 1]
    assert told["mean_acceptance_length"] == pytest.approx(13 / 5)


@pytest.mark.parametrize("is_mean", [False, True])
def test_printed_tasks_of_spec_bench(tmp_path: Path, is_mean: bool) -> None:
    mean, std, base = (
        ("Mean result: ", ", Std result: 0.3", " (baseline)")
        if is_mean
        else (("", "", " for the baseline"))
    )
    tasks = ("mt_bench", 3.25, 121.5), ("qa", 2.5, 88.25), ("overall", 2.75, 100.5)
    text = "".join(PRINTED.format(t, m, mean, s, std, base, mean) for t, m, s in tasks)
    store = imported(tmp_path, text)
    told = [(one["place"], *_figures(one["told"])) for one in store.runs[0]["requests"]]
    assert told == [*tasks[:2]]


def test_many_tasks_are_not_looked_through_for_each_sum(tmp_path: Path) -> None:
    sums = "".join(f"#Mean accepted tokens: {2 + i % 7 / 10}\n" for i in range(3000))
    start = time.process_time()
    imported(tmp_path, sums + "========= Task: x =========\n" * 200_000)
    assert time.process_time() - start < 8


def _figures(told: dict[str, Any]) -> tuple[float, float]:
    return told["mean_acceptance_length"], told["predicted_per_second"]


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("| run | acc@pos1 | acc@pos2 |\n|-|-|-|\n| a | 81% | 44% |\n", [0.81, 0.44]),
        ("run,accept_rate_pos_0,accept_rate_pos_1,tps\na,0.75,0.5,88\n", [0.75, 0.5]),
        ('{"name": "a", "accept_rate_pos_0": 0.75, "accept_rate_pos_1": 0.5}', [0.75, 0.5]),
        # and not the rate of all drafted tokens
        (
            "| run | Pos 0 acceptance | Pos 1 acceptance |\n|-|-|-|\n| a | 81% | 44% |\n",
            [0.81, 0.44],
        ),
    ],
)
def test_columns_by_index_alone(tmp_path: Path, text: str, rates: list[float]) -> None:
    (told,) = _told(imported(tmp_path, text))
    assert told["acceptance_per_position"]["unconditional"] == rates
    assert told["draft_acceptance_rate"] is None


def test_whole_numbers_by_index_may_be_counts(tmp_path: Path) -> None:
    table = "| run | pos 1 | pos 2 | accept len |\n|-|-|-|-|\n| a | 90 | 45 | 2.35 |\n"
    (told,) = _told(imported(tmp_path, table))
    assert told["mean_acceptance_length"] == 2.35
    assert told["acceptance_per_position"] is None
