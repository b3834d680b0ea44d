"""Averages, attempts and shares of positions, as benchmark programs print and keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.observe.files.importing import import_file, recognise
from engine.trace.store import TraceStore
from tests.engine.observe.files.pasted_text import SUMS, imported, read, sums

ATTEMPTS = """
| task     | run | stage   |  tokens | stop  | time(s) |   tok/s | rounds |    accepted |    rate |  a.len | pos accept                   |
|----------|-----|---------|---------|-------|---------|---------|--------|-------------|---------|--------|------------------------------|
| code     |   1 | mtp     |     301 | eog   |   4.500 |   66.89 |    100 |     200/300 |  66.67% |   3.00 | 80.0% 70.0% 50.0%            |
| story    |   1 | mtp     |     256 | limit |   5.000 |   51.20 |     90 |     166/269 |  61.71% |   2.84 | 85.6% 60.0% 40.0%            |
| none     |   1 | base    |     256 | limit |   9.000 |   28.44 |      - |           - |       - |      - | -                            |

Repeat summary (1 runs/task)
"""  # noqa: E501
STAGE = {"type": "mtp", "drafted_by_position": [4, 3], "accepted_by_position": [3, 1]}


def _spec_bench(is_detailed: bool) -> str:
    counts = {"draft_tokens": 7, "accept_length": 2.0}
    if not is_detailed:
        stage = STAGE | {"drafts": 4, "accepted": 4} | counts
        head = {"row_type": "attempt", "task": "code", "run": 1, "ok": True, "stop": "eog"}
        rows = [head | {"generated": 9, "decode_s": 0.5, "stages": [stage], "error": None}]
    else:
        stage = STAGE | {"num_drafts": 4, "accepted_tokens": 4} | counts
        head = {"row_type": "attempt", "task_id": "a", "task_name": "code", "repeat_index": 0}
        rest = {"timing": {"decode_s": 0.5}, "tokens": {"prompt": 20, "generated": 9}}
        rows = [head | rest | {"speculative": {"num_drafts": 4, "stages": [stage]}}]
    rows.append({"row_type": "summary", "attempts": 1, "speculative": {"stages": [stage]}})
    return "ggml_init: found 1 device\n" + "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("is_detailed", [False, True])
def test_attempts_of_spec_bench(tmp_path: Path, is_detailed: bool) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(_spec_bench(is_detailed))
    store = TraceStore()
    import_file(store, path)
    summary = store.runs[0]["summary"]
    assert [summary[name] for name in SUMS] == [9, 4, 7, 4]
    assert summary["acceptance_histogram"] == [1, 2, 1]
    assert [one.rule for one in find(store)] == ["log-unread"]  # the line before them
    assert len(store.runs[0]["stops"]) == 1


def test_the_table_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text(ATTEMPTS)
    store = TraceStore()
    import_file(store, path)
    one, other, base = (request["told"] for request in store.runs[0]["requests"])
    assert [one[name] for name in SUMS] == [301, 100, 300, 200]
    assert one["num_accepted_tokens_per_pos"] == [80, 70, 50]
    assert [other[name] for name in SUMS] == [256, 90, 269, 166]
    assert other["acceptance_per_position"] is None  # the shares are of drafts that went so far
    assert base["predicted_n"] == 256 and base.get("draft_n") is None and not find(store)


@pytest.mark.parametrize(
    "table",
    [
        "| n | draft | acc | t/s |\n| a | 40 | 30 | 9 |\n",
        "| n | t/s | draft accepted |\n| a | 9 | 30/40 (75%) |\n",
    ],
)
def test_a_table_may_have_counts(tmp_path: Path, table: str) -> None:
    assert sums(imported(tmp_path, table)) == [(None, None, 40, 30)]


POSITIONS = """Samples: 9

Mean acceptance length: 2.76
Avg Draft Acceptance Rate: 25.0%

Pos 1: 0.576
Pos 2: 0.378
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("acc_length=2.20\nspeed=125.59 token/s\n", (2.2, None, None)),
        (POSITIONS, (2.76, 0.25, [0.576, 0.378])),
        ('{"backend": "sglang", "total_output_tokens": 9, "accept_length": 2.61}',
         (2.61, None, None)),
        ("k=2: [01:34<00:00, output: 175.49 toks/s] **Accpt Len: 1.89**\n", (1.89, None, None)),
        ("```\nMean acceptance length: 2.50\nPer-position acceptance rate: 1.000, 0.500\n```\n",
         (2.5, None, [1.0, 0.5])),
    ],
)  # fmt: skip
def test_averages_alone(text: str, told: tuple[Any, ...], tmp_path: Path) -> None:
    (one,) = next(iter(imported(tmp_path, text).runs.values())).requests or ()
    names = "mean_acceptance_length", "draft_acceptance_rate", "acceptance_per_position"
    mean, rate, by_index = map(one.told.get, names)
    assert (mean, rate, by_index and by_index["unconditional"]) == told


def test_a_wrapped_line_of_vllm_is_no_benchmark() -> None:
    line = b"INFO [metrics.py:96] SpecDecoding metrics:\nMean acceptance length: 1.90, "
    line += b"Accepted: 9 tokens, Drafted: 10 tokens"
    assert recognise(line.replace(b"metrics:\n", b"metrics: \n")) != "benchmark"


def test_what_openvino_prints_has_accepted_tokens(tmp_path: Path) -> None:
    text = "MAIN MODEL\n  Num generated token: 200 tokens\n  Num accepted token: 119 tokens\n"
    text += "DRAFT MODEL\n  Num generated token: 324 tokens\n"
    (one,) = read(text, tmp_path).runs[0]["requests"]
    assert [one["told"].get(name) for name in SUMS] == [200, None, None, None]
    assert one["told"]["num_accepted_draft_tokens"] == 119 and one["engine"] == "openvino"


def test_shares_of_all_positions_are_counts(tmp_path: Path) -> None:
    text = (
        "Total generated tokens: 900\nDrafts: 200\nDraft tokens: 400\nAccepted tokens: 240\n"
        "Per-position acceptance (%):\n  Position 0:   75.00\n  Position 1:   45.00\n"
    )
    told = read(text, tmp_path).runs[0]["requests"][0]["told"]
    assert told["num_accepted_tokens_per_pos"] == [150, 90]


def test_what_speed_bench_keeps_has_its_samples(tmp_path: Path) -> None:
    """Of a server without speculation it writes 0 drafted tokens: not observed."""
    sample = {"category": "math", "ok": True, "latency_s": 3.5, "prompt_tokens": 90, "error": None}
    sample |= {"completion_tokens": 200, "prompt_ms": 100.0, "predicted_ms": 5000.0}
    samples = [
        sample | {"id": name, "draft_n": drafted, "draft_n_accepted": accepted}
        for name, drafted, accepted in (("a", 150, 90), ("b", 0, 0))
    ]
    summary = [{"category": "math", "requests": 2, "draft_n": 150, "accepted": 90}]
    store = read(json.dumps({"config": {}, "summary": summary, "results": samples}), tmp_path)
    told = [one["told"] for one in store.runs[0]["requests"]]
    assert [[one.get(name) for name in SUMS] for one in told] == [
        [200, None, 150, 90],
        [200, None, None, None],
    ]
    assert [one["predicted_ms"] for one in told] == [5000.0, 5000.0]


def test_the_averages_of_tensorrt_llms_benchmark(tmp_path: Path) -> None:
    names = ("DT", 200.0), ("ADT", 120.0), ("DAR", 0.6), ("AL", 2.5)
    lines = [f"[{name}] {kind:<7}: {value:.2f}" for name, value in names
             for kind in ("MINIMUM", "AVERAGE", "P50")]  # fmt: skip
    store = read("= DECODING STATISTICS (MTP)\n" + "\n".join(lines) + "\n", tmp_path)
    assert store.runs[0]["source"]["engine"] == "tensorrt-llm"
    told = store.runs[0]["requests"][0]["told"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (2.5, 0.6)
    assert [told.get(name) for name in SUMS] == [None] * 4
