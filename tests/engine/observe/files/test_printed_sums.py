"""Sums as benchmark programs print and keep them, counters as people copy them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find, record_findings
from engine.errors import TraceFileError
from engine.observe.files.importing import import_file, recognise
from engine.observe.files.line_words import REQUESTS
from engine.observe.rounds.log_shapes import says_nothing, shape_of
from engine.trace.store import TraceStore

SUMS = ("predicted_n", "num_spec_steps", "draft_n", "draft_n_accepted")
SPECULATIVE = """
n_draft   = 8
n_predict = 129
n_drafted = 132
n_accept  = 47
accept    = 35.606%

draft:

llama_print_timings: prompt eval time =   363.60 ms /     8 tokens (   45.45 ms per token)
llama_print_timings:        eval time = 27360.44 ms /   214 runs   (  127.85 ms per token)
"""
BENCH = """============ Result ============
Successful requests:                     4
Total generated tokens:                  800
---------------Speculative Decoding---------------
Acceptance rate (%):                     30.00
Acceptance length:                       1.60
Drafts:                                  500
Draft tokens:                            1000
Accepted tokens:                         300
Per-position acceptance (%):
  Position 0:                            40.00
  Position 1:                            20.00
==================================
"""
SAVED = {
    "backend": "vllm",
    "total_output_tokens": 800,
    "spec_decode_acceptance_rate": 30.0,
    "spec_decode_acceptance_length": 1.6,
    "spec_decode_num_drafts": 500,
    "spec_decode_draft_tokens": 1000,
    "spec_decode_accepted_tokens": 300,
    "spec_decode_per_position_acceptance_rates": [0.4, 0.2],
}
EXAMPLE = """total_num_output_tokens: 90
num_drafts: 40
num_draft_tokens: 120
num_accepted_tokens: 50
mean acceptance length: 2.25
acceptance at token 0: 0.70
"""


def imported(tmp_path: Path, text: str) -> TraceStore:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    store = TraceStore()
    record_findings(store, import_file(store, path))
    return store


def sums(store: TraceStore) -> list[tuple[Any, ...]]:
    """Of each request."""
    return [tuple(one["told"].get(n) for n in SUMS) for one in store.runs[0]["requests"]]


def rules(store: TraceStore) -> list[str]:
    return [finding.rule for finding in find(store)]


@pytest.mark.parametrize(
    ("text", "expected", "engine"),
    [
        (SPECULATIVE, [(129, None, 132, 47)], "llama.cpp"),
        (BENCH, [(800, 500, 1000, 300)], "vllm"),
        (json.dumps(SAVED), [(800, 500, 1000, 300)], "vllm"),
        ('before:\n- "spec_decode_draft_tokens": **90**\n- "spec_decode_accepted_tokens": 60\n',
         [(None, None, 90, 60)], "vllm"),
        (BENCH.replace("\n", "\r\n"), [(800, 500, 1000, 300)], "vllm"),
        (EXAMPLE, [(90, 40, 120, 50)], "vllm"),
        (EXAMPLE + EXAMPLE.replace("50", "40").replace("2.25", "2.00"), [(90, 40, 120, 50),
         (90, 40, 120, 40)], "vllm"),
        ("Output throughput: 3.1\nAccept length: 2.75\n", [(None, None, None, None)], "sglang"),
        ("> Output throughput: 3.1\n> Average Accept length: 1.02\n", [(None,) * 4], "sglang"),
        ("acc_length=2.20\nspeed=125.59 token/s\n", [(None,) * 4], "sglang"),
        ("#questions: 80, Throughput: 276.30 token/s, Acceptance length: 5.36",
         [(None, None, None, None)], "sglang"),
    ],
)  # fmt: skip
def test_what_a_program_prints_at_its_end(
    tmp_path: Path, text: str, expected: list[Any], engine: str
) -> None:
    store = imported(tmp_path, text)
    assert sums(store) == expected and not rules(store)
    assert store.runs[0]["source"]["engine"] == engine and not len(store.rounds)
    assert all(0 not in one for one in sums(store))


def test_a_length_alone_is_an_average(tmp_path: Path) -> None:
    told = imported(tmp_path, "Accept length: 2.75\n").runs[0]["requests"][0]["told"]
    assert told["mean_acceptance_length"] == 2.75 and told.get("draft_n") is None


@pytest.mark.parametrize(
    "change", [("1.60", "1.90"), ("30.00", "31.00"), ("1000", "100"), ("  300", "  301")]
)
def test_printed_sums_that_disagree_are_found(tmp_path: Path, change: tuple[str, str]) -> None:
    assert "counters-contradict" in rules(imported(tmp_path, BENCH.replace(*change)))


def test_a_summary_of_aiperf_leaves_the_warmup_out(tmp_path: Path) -> None:
    def one(value: float) -> dict[str, Any]:
        return {"unit": "count", "avg": value}

    totals = {
        "total_spec_decode_steps": one(10.0),
        "total_draft_tokens": one(30.0),
        "total_accepted_draft_tokens": one(12.0),
    }
    text = json.dumps(totals | {"warmup_metrics": totals})
    assert sums(imported(tmp_path, text)) == [(None, 10, 30, 12)]
    wrong = totals | {"spec_decode_token_weighted_acceptance_length": one(3.5)}
    assert "counters-contradict" in rules(imported(tmp_path, json.dumps(wrong)))


TABLE = """<details>
$ curl -s http://h:8000/metrics | grep spec
vllm:spec_decode_num_drafts_total{engine="0"} | 22
-- | --
vllm:spec_decode_num_draft_tokens_total{engine="0"} | 66
| vllm:spec_decode_num_accepted_tokens_total{engine="0"} | 10 |
"""


def test_counters_in_a_table_are_counters(tmp_path: Path) -> None:
    store = imported(tmp_path, TABLE.partition("\n")[2].partition("\n")[2])
    assert sums(store) == [(None, 22, 66, 10)]
    store = imported(tmp_path, TABLE)
    assert sums(store) == [(None, 22, 66, 10)]
    assert not rules(store)


@pytest.mark.parametrize(
    "before", ["> ", "    ", "12:", "\ufeff", "\x1b[01;31m\x1b[K", "vllm-1  | "]
)
def test_what_stands_before_counters(tmp_path: Path, before: str) -> None:
    rows = [line.strip("| ").replace("|", "") for line in TABLE.splitlines() if "_total" in line]
    store = imported(tmp_path, "".join(f"{before}{row}\n" for row in rows))
    assert sums(store) == [(None, 22, 66, 10)]


def test_values_that_a_person_has_left_out_are_not_there(tmp_path: Path) -> None:
    text = """{ "choices": [ ... ], "usage": {...}, "metrics": {"speculative_decoding":
      {"mean_acceptance_length": 1.5, "num_spec_steps": 20, "num_draft_tokens": 60,
       "num_accepted_draft_tokens": 10, "acceptance_histogram": [12, 6, 2, 0]}}}"""
    assert sums(imported(tmp_path, text)) == [(None, 20, 60, 10)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (("INFO 07-24 04:00:31 metrics.py:316] Speculative metrics: Draft acceptance rate: 0.250, "
         "System efficiency: 0.1, Number of speculative tokens: 4, Number of accepted tokens: 10, "
         "Number of draft tokens tokens: 40, Number of emitted tokens tokens: 20."),
         (20, 40, 10, None, None)),
        (("[ts] [2026-07-24 20:53:48,415 ATTN TP RANK 0] - INFO - Decode batch. #running-req: 2, "
         "gen throughput (token/s): 539.35, avg_accept_len: 1.90, accept_rate: 0.30, "),
         (None, None, None, 1.9, 0.3)),
    ],
)  # fmt: skip
def test_lines_of_other_builds(tmp_path: Path, text: str, expected: tuple[Any, ...]) -> None:
    store = imported(tmp_path, text)
    told = store.runs[0]["requests"][0]["told"]
    names = ("predicted_n", "draft_n", "draft_n_accepted", "mean_acceptance_length")
    given = tuple(told.get(name) for name in (*names, "draft_acceptance_rate"))
    if expected[3] is None:
        assert given[:3] == expected[:3]
    else:
        assert given == expected
    assert not store.runs[0].get("server")


BLOCK = """Number of drafts: 40
Draft tokens proposed: 80
Draft tokens accepted: 50
Per-position acceptance rates:
  Position 0: 0.7500
  Position 1: 0.5000
"""


@pytest.mark.parametrize(
    ("text", "expected", "told"),
    [
        (BLOCK, (None, 40, 80, 50), {"num_accepted_tokens_per_pos": [30, 20]}),
        (("Total tokens generated: 210\nDraft tokens created: 40\nDraft tokens accepted: 12\n"
         "Tokens per second: 50.0\n"), (210, None, 40, 12), {"predicted_per_second": 50.0}),
        ("Rounds:    9\nDrafted:   27\nAccepted:  12 (44.4%)\nGenerated: 21 tokens in 1.5s\n",
         (21, 9, 27, 12), {}),
        ("- cycles=36\n- drafted=36\n- accepted_drafts=29\n- emitted=65\n- accept_rate=80.6%\n",
         (65, 36, 36, 29), {}),
        ("stats:\ncycles=91 proposed=46 accepted_draft=32 accept_rate=69.57% avg_accept=0.352\n",
         (None, 91, 46, 32), {}),
        ("  [01/10] n_tok=  84  AR= 30.79  DFlash= 104.23  AL=11.64\n",
         (84, None, None, None), {"mean_acceptance_length": 11.64}),
        ("#questions: 8, Throughput: 26.30 token/s, Acceptance length: 2.21",
         (None,) * 4, {"mean_acceptance_length": 2.21, "predicted_per_second": 26.3}),
        (("vanilla, input: 47.0 toks/s, output: 127.6 toks/s\n"
         "k=2: input: 60.5 toks/s, output: 174.4 toks/s] **Accpt Len: 1.87**\n"),
         (None,) * 4, {"mean_acceptance_length": 1.87, "predicted_per_second": 174.4}),
    ],
)  # fmt: skip
def test_lines_of_a_name_and_a_number(
    text: str, expected: tuple[Any, ...], told: dict[str, Any], tmp_path: Path
) -> None:
    store = imported(tmp_path, text)
    assert sums(store) == [expected]
    found = store.runs[0]["requests"][0]["told"]
    assert {name: found[name] for name in told} == told and not rules(store)


@pytest.mark.parametrize(
    ("table", "rates"),
    [
        (("| a | acceptance (n=2 / n=4) | t/s (n=2 / n=4) |\n|---|---|---|\n"
         "| code | 0.83 / 0.62 | 41.0 / 47.5 |\n"), [(0.83, 41.0), (0.62, 47.5)]),
        ("| a | acceptance | t/s |\n|---|---|---|\n| code | 51% → 62.5% | 40.5 → 47.5 |\n",
         [(0.51, 40.5), (0.625, 47.5)]),
        ("| a | acceptance | t/s |\n|---|---|---|\n| code | 0.83 / 0.62 | 41.0 |\n",
         [(None, 41.0)]),
        ("| a | acceptance | plain t/s |\n|---|---|---|\n| code | 0.83 | 41.0 |\n", [(0.83, None)]),
        (("| Metric | off | on | % Difference |\n|---|---|---|---|\n"
         "| Output (tok/s) | 10.5 | 12.5 | +19% |\n| Accept rate | - | 0.63 | N/A |\n"),
         [(None, 10.5), (0.63, 12.5)]),
    ],
)  # fmt: skip
def test_cells_of_several_settings(
    table: str, rates: list[tuple[float | None, ...]], tmp_path: Path
) -> None:
    told = [one["told"] for one in imported(tmp_path, table).runs[0]["requests"]]
    names = "draft_acceptance_rate", "predicted_per_second"
    assert [tuple(map(one.get, names)) for one in told] == rates


def test_a_cell_of_three_rates_is_by_position(tmp_path: Path) -> None:
    table = "| Metric | Value |\n| --- | ---: |\n| Accept ratio | 0.9201 0.6612 0.3310 |\n"
    (one,) = imported(tmp_path, table).runs[0]["requests"]
    rates = one["told"]["acceptance_per_position"]["unconditional"]
    assert rates == [0.9201, 0.6612, 0.331] and one["told"]["draft_acceptance_rate"] is None


def test_accepted_in_a_round_is_a_length(tmp_path: Path) -> None:
    table = "| a | tokens | rounds | accept/round |\n|---|---|---|---|\n| b | 77 | 14 | 4.57 |\n"
    (one,) = imported(tmp_path, table).runs[0]["requests"]
    assert one["told"]["mean_acceptance_length"] == pytest.approx(5.57)
    assert sums(imported(tmp_path, table)) == [(77, 14, None, None)]


@pytest.mark.parametrize(
    "text", ["drafts are nice", "position 3: 4", "p = 3%", "steps: 9\nmean length: 3\n"]
)
def test_other_texts_are_no_sums(text: str) -> None:
    assert recognise(text.encode()) is None


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


def test_counters_of_rapid_mlx(tmp_path: Path) -> None:
    labels = 'family="qwen",method="mtp"'
    counts = {"attempts": 6, "accepts": 4, "verify_calls": 2, "bonus_tokens": 1}
    lines = [f"rapid_mlx_spec_decode_{k}_total{{{labels}}} {n}" for k, n in counts.items()]
    for depth, n in enumerate((2, 1, 1), 1):
        name = "rapid_mlx_spec_decode_accepted_by_depth_total"
        lines.append(f'{name}{{{labels},depth="{depth}"}} {n}')
    lines.append(f"rapid_mlx_spec_decode_accept_ratio{{{labels}}} 0.667")
    lines.append('rapid_mlx_spec_decode_dflash_attempts_total{family="qwen"} 99')
    path = tmp_path / "metrics.txt"
    path.write_text("\n".join(lines) + "\n")
    store = TraceStore()
    import_file(store, path)
    summary = store.runs[0]["summary"]
    assert [summary[name] for name in SUMS] == [None, 2, 6, 4]
    assert summary["num_accepted_tokens_per_pos"][:3] == [2, 1, 1] and not find(store)


STATISTICS = (
    "statistics        draft-mtp: #calls(b,g,a) =    1    {0}    {0}, #gen drafts =    {0}, "
    "#acc drafts =    9, #gen tokens =    {1}, #acc tokens =    {2}, dur(b,g,a) = 0.1, 7.1, 0.2\n"
)


def test_totals_of_drafters_alone_are_a_run(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(STATISTICS.format(10, 30, 12) + STATISTICS.format(20, 60, 30))
    store = TraceStore()
    (run,) = import_file(store, path)
    assert store.runs[run].told is not None
    told = store.runs[run].told
    assert [told.get(name) for name in SUMS[1:]] == [20, 60, 30]
    assert told["predicted_n"] is None


@pytest.mark.parametrize("kind", ["javascript", "python"])
def test_objects_as_other_languages_print_them(tmp_path: Path, kind: str) -> None:
    counts = {"predictedTokensCount": 40, "totalDraftTokensCount": 60, "stopReason": "it's"}
    counts |= {"acceptedDraftTokensCount": 25, "rejectedDraftTokensCount": 30}
    counts |= {"ignoredDraftTokensCount": 5}
    texts = {"python": repr(counts)}
    members = ",\n".join(f"  {key}: {value!r}" for key, value in counts.items())
    texts["javascript"] = "{\n" + members + ",\n  more: undefined,\n}"
    path = tmp_path / "reply.txt"
    path.write_text(texts[kind])
    store = TraceStore()
    (run,) = import_file(store, path)
    told = store.runs[run].told
    assert told is not None
    assert (told["predicted_n"], told["draft_n"], told["draft_n_accepted"]) == (40, 55, 25)


TENSORRT = """# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{engine_type="trtllm",model_name="m"} 900.0
trtllm_spec_decode_num_accepted_tokens_total{engine_type="trtllm",model_name="m"} 540.0
trtllm_spec_decode_acceptance_length{engine_type="trtllm",model_name="m"} 2.8
"""
LLAMA_BEFORE = """llamacpp:tokens_predicted_total 4000
llamacpp:draft_tokens_total 3600
llamacpp:draft_tokens_accepted_total 2700
llamacpp:draft_verify_steps_total 1200
"""


PYTHON = (
    "ChatCompletion(id='a', usage=Usage(n=3), timings={'predicted_n': 9, 'predicted_ms': 2.5, "
    "'prompt_n': 1, 'prompt_ms': 1.5, 'draft_n': 8, 'draft_n_accepted': 3})"
)
QUERIED = json.dumps(
    {
        "data": {
            "result": [
                {
                    "metric": {"engine": "0", "__name__": f"vllm:spec_decode_num_{name}_total"},
                    "value": [1787366173.1, str(n)],
                }
                for name, n in (("drafts", 100), ("draft_tokens", 300), ("accepted_tokens", 180))
            ]
        }
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TENSORRT, (None, None, 900, 540)),
        (QUERIED, (None, 100, 300, 180)),
        ('{"mtp": {"attempts": 400, "accepted": 300, "rejected": 100}}', (None, None, 400, 300)),
        (PYTHON, (9, None, 8, 3)),
        ("timings:\n  predicted_n: 9\n  draft_n: 8\n  draft_n_accepted: 3\n", (9, None, 8, 3)),
        ('{"states": [{"avg_spec_accept_length": null}, {"avg_spec_accept_length": 2}]}',
         (None,) * 4),
        (LLAMA_BEFORE, (4000, 1200, 3600, 2700)),
        (LLAMA_BEFORE.replace("draft_tokens_accepted", "spec_tokens_accepted"), None),
        ("llamacpp:spec_tokens_drafted_total 9\nllamacpp:spec_tokens_accepted_total 6\n",
         (None, None, 9, 6)),
    ],
)  # fmt: skip
def test_counters_by_other_names(
    text: str, expected: tuple[Any, ...] | None, tmp_path: Path
) -> None:
    assert sums(imported(tmp_path, text)) == [expected or (4000, 1200, 3600, 2700)]


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
    line = b"INFO [metrics.py:96] SpecDecoding metrics:\nMean acceptance length: 1.90, Accepted: 9"
    assert recognise(line.replace(b"metrics:\n", b"metrics: \n")) != "benchmark"


CONSOLE = """
                  NVIDIA AIPerf: Spec Decode
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┓
┃                            Metric ┃    avg ┃   min ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━┩
│         Acceptance Length (ratio) │   2.61 │  1.00 │
│  Token-Weighted Acceptance Length │   2.55 │   N/A │
│                           (ratio) │        │       │
│         Draft Acceptance Rate (%) │  52.20 │  0.00 │
│ Overall Draft Acceptance Rate (%) │  51.70 │   N/A │
└───────────────────────────────────┴────────┴───────┘
  Accepted drafts per step (% of steps):  0: 20%   1: 25%   2: 35%   3: 20%
"""
SPEEDS = """Summary (elapsed=101.20s)
category    samples  avg_prompt_t/s  avg_pred_t/s  avg_latency  accept_rate
----------  -------  --------------  ------------  -----------  -----------
coding      8        812.10          41.20         10.120s      0.7312
writing     8        811.40          22.00         15.300s      n/a
overall     16       806.20          33.70         10.710s      0.6907
"""
COMPARED = """Comparison: baseline=a.json speculative=b.json
category  base_avg_pred_t/s  spec_avg_pred_t/s  decode_speedup  accept_rate
--------  -----------------  -----------------  --------------  -----------
coding    25.10              41.20              1.64x           0.7312
writing   25.00              22.00              0.88x           n/a
overall   25.05              39.60              1.58x           0.6907
"""
SETTINGS = """
| n_max | avg_pred_t/s | accept_rate |
|-------|--------------|-------------|
| 2 | 41.2 | 73.12% |
| 5 | 22 | n/a |
"""


def _read(text: str, tmp_path: Path) -> TraceStore:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    store = TraceStore()
    import_file(store, path)
    assert not find(store)
    return store


@pytest.mark.parametrize("mark", ["│", "|"])
def test_the_console_table_of_aiperf(tmp_path: Path, mark: str) -> None:
    store = _read(CONSOLE.replace("│", mark), tmp_path)
    told = store.runs[0]["requests"][0]["told"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (2.55, 0.517)
    by_position = told["acceptance_per_position"]["unconditional"]
    assert (
        by_position == [0.8, 0.55, 0.2] and 1 + sum(by_position) == told["mean_acceptance_length"]
    )
    assert [told.get(name) for name in SUMS] == [None] * 4  # averages of requests are no counts
    assert store.runs[0]["source"]["engine"] == "aiperf"


@pytest.mark.parametrize("text", [SPEEDS, COMPARED, SETTINGS], ids=["one", "two", "settings"])
def test_the_tables_of_speed_bench(tmp_path: Path, text: str) -> None:
    requests = _read(text, tmp_path).runs[0]["requests"]
    assert [one["place"] for one in requests] in (["coding", "writing"], ["2", "5"])
    told = [one["told"] for one in requests]
    assert [one["predicted_per_second"] for one in told] == [41.2, 22.0]
    assert [one["draft_acceptance_rate"] for one in told] == [pytest.approx(0.7312), None]
    assert not any(one.get(name) is not None for one in told for name in SUMS)


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            "| version | tps | draft acceptance |\n| -- | -- | -- |\n| 0.9 | 61.5 | 0.41 |\n",
            [("0.9", 61.5, 0.41)],
        ),
        (
            (
                "> | Config | Decode tok/s | Draft acceptance |\n> |---|---:|---:|\n"
                "> | none | 26.5 | — |\n> | `-n 3` | 23.5 | **34%** |\n"
                "> | `-n 2` | 9.0 | n/a |\n"
            ),
            [("none", 26.5, None), ("-n 3", 23.5, 0.34), ("-n 2", 9.0, None)],
        ),
        (
            "│ n-max │ T/s (CUDA) │ draft rate │\n│ 1 │ 47.7 │ 0.47 │\n│ total │ 40.1 │ 0.3 │\n",
            [("1", 47.7, 0.47)],
        ),
        (
            (
                "<table><tr><th>config</th><th>tok/s</th><th>draft acceptance</th></tr>\n"
                "<tr>\n<td>n=2</td>\n<td>41.5</td>\n<td>73.5%</td>\n</tr>\n"
                "<tr>\n<td>n=4</td>\n<td>40.5</td>\n<td>53.5%</td>\n</tr>\n</table>\n"
            ),
            [("n=2", 41.5, 0.735), ("n=4", 40.5, 0.535)],
        ),
        ("config,tok/s,acceptance\nn=2,41.5,0.735\n", [("n=2", 41.5, 0.735)]),
        ("n_max\tDFlash (tok/s)\t接受率\n\n8\t194.5\t85%\n", [("8", 194.5, 0.85)]),
        ("| config | t/s | Accept Rate (avg) |\n| a | 9 | **0.5** |\n", [("a", 9, 0.5)]),
        (
            (
                "| n | old decode | new decode | old acc | new acc |\n"
                "| 0 | 14.2 tok/s | ~14 tok/s | 50% | 60% |\n"
            ),
            [("0, old", 14.2, 0.5), ("0, new", 14, 0.6)],
        ),
        ("| draft | t/s | acc |\n| 3 | 60.1 | 55% |\n", [("line 4", 60.1, 0.55)]),
        ("| n | t/s | accept rate |\n| a | 38.7 | 64,5 % |\n", [("a", 38.7, 0.645)]),
        ("Prompt\tTok/s\tAkzeptanzrate\ncode\t140,1\t0,94\n", [("code", 140.1, 0.94)]),
        ("| n-max | average tk\\s | accept_rate |\n| n/a | 22.9 | n/a |\n", [("n/a", 22.9, None)]),
        ('Step,"a - spec/accept_rate","a/tok/s"\n10,0.61,44.5\n', [("10", 44.5, 0.61)]),
        (
            "┌─┬─┬─┐\n│ n │ t/s │ accept rate │\n├─┼─┼─┤\n│ a │ 9 │ 0.5 │\n└─┴─┴─┘\n",
            [("a", 9, 0.5)],
        ),
        (
            "[1/2] tok/s= 8.5 n=4 acc_rate=0.5\nall mean: tok/s=9 n=4 acc_rate=0.6\n",
            [("[1/2]", 8.5, 0.5)],
        ),
        (
            (
                "| Metric | off | on |\n|---|---|---|\n| Output tokens (tok/s) | 8.5 | 15.5 |\n"
                "| Accept rate | - | 0.5 |\n"
            ),
            [("off", 8.5, None), ("on", 15.5, 0.5)],
        ),
        (
            (
                "| | plain | mtp |\n|---|---:|---:|\n| decode | 16.8 t/s | **26.8 t/s** (+59%) |\n"
                "| TTFT | 1.4 s | 1.4 s |\n| accept rate | — | **0.72** |\n"
            ),
            [("plain", 16.8, None), ("mtp", 26.8, 0.72)],
        ),
        (
            "上下文\tBaseline (tok/s)\tDFlash (tok/s)\t接受率\t显存\n\n256\t74.3\t193.2\t85%\n",
            [("256", 193.2, 0.85)],
        ),
        (
            (
                "| Backend |\nQuant |\ntok/s |\nMTP accept (per position) |\n| llama.cpp |\n"
                "Q6_K |\n43.4 |\n~55% |\n| vLLM |\nINT8 |\n41.9 |\nn/a |\n"
            ),
            [("llama.cpp Q6_K", 43.4, 0.55), ("vLLM INT8", 41.9, None)],
        ),
        (
            (
                "- plain: 66.1 tok/s, 22,449 MiB\n- n-max 2: 129.2 tok/s, 80.7% total acceptance\n"
                "- n-max 4: 144.4 tok/s, 63.9% accepted, +118.5% over the first\n"
                "- 84–89% accept rate\n- +3% acceptance\n- 5% lower acceptance\n"
                "- it needs 70% acceptance\n- 5% acceptance loss at 40 t/s\n"
            ),
            [("line 4", 129.2, 0.807), ("line 5", 144.4, 0.639)],
        ),
    ],
)
def test_tables_that_people_write_have_rates(
    tmp_path: Path, table: str, rows: list[tuple[Any, ...]]
) -> None:
    requests = _read(f"My numbers:\n\n{table}\nwhy?\n", tmp_path).runs[0]["requests"]
    names = "predicted_per_second", "draft_acceptance_rate"
    assert [(one["place"], *(one["told"][name] for name in names)) for one in requests] == rows
    assert all(one["told"].get(name) is None for one in requests for name in SUMS)


def test_a_range_is_no_rate(tmp_path: Path) -> None:
    rows = "| 100 | 81-90% | 20.5 |\n| 34K | ~54% | 15 |\n| 86K | 41 – 56% / 9% | 9 |\n"
    store = imported(tmp_path, f"| ctx | Acceptance | t/s |\n|---|---|---|\n{rows}")
    told = [one["told"] for one in store.runs[0]["requests"]]
    names = "predicted_per_second", "draft_acceptance_rate"
    assert [tuple(one[name] for name in names) for one in told] == [
        (20.5, None), (15, 0.54), (9, None),
    ]  # fmt: skip
    (finding,) = find(store)
    assert finding.rule == "log-unread" and "(2), the first in line 3: 81-90%" in finding.message


def test_sums_and_the_lines_of_a_server_are_runs(tmp_path: Path) -> None:
    line = "[2026-09-12 10:00:0{}] Decode batch, #running-req: 1, accept len: 1.05, cuda graph: x"
    log = "\n".join(map(line.format, range(2)))
    store = imported(tmp_path, f"Average Accept length: 1.041\n\nSome lines:\n{log}\n")
    lengths = [
        [request["told"]["mean_acceptance_length"] for request in run["requests"]]
        for run in store.runs.values()
    ]
    assert lengths == [[1.05, 1.05], [1.041]]


def test_a_table_may_have_counts_in_a_cell(tmp_path: Path) -> None:
    table = (
        "| Prompt | Variant | t/s | Accept rate | Draft stats |\n|---|---:|---:|---:|---|\n"
        "| code | mtp | 62.5 +/- 0.1 | 76.7% | `mtp: drafts 266/302, tokens 695/906` |\n"
    )
    (one,) = _read(table, tmp_path).runs[0]["requests"]
    assert one["place"] == "code mtp" and one["told"]["predicted_per_second"] == 62.5
    assert [one["told"].get(name) for name in SUMS] == [None, 302, 906, 695]


COUNTS = "code", 1300, 780, "prose", 690, 300
"""Of each row what it is of, the drafted tokens, the accepted ones."""


@pytest.mark.parametrize(
    "table",
    [
        "prompt  drafted  accepted  rate\ncode  1300  780  0.6\nprose  690  300  0.435\n",
        "prompt;drafted;accepted;rate\ncode;1.300;780;0,6\nprose;690;300;0,435\n",
        "p;drafted;accepted;rate\ncode;1\u202f300;780;60,0 %\nprose;690;300;43,5 %\n",
        "Prompt\tEntworfen\tAngenommen\tRate\ncode\t1.300\t780\t60,0 %\nprose\t690\t300\t4,3 %\n",
        (
            "| p | drafted | accepted | t/s |\n|-|-|-|-|\n| code | 1,300 | 780 | 9.5 |\n"
            "| prose | 690 | 300 | 8 |\n"
        ),
        "p;drafted;accepted\ncode;1'300;780\nprose;690;300\n",
    ],
    ids=["blanks", "German", "French", "tabs", "English", "Swiss"],
)
def test_numbers_of_tables_are_read_as_they_are_written(tmp_path: Path, table: str) -> None:
    requests = _read(table, tmp_path).runs[0]["requests"]
    found = [(one["place"], one["told"]["num_draft_tokens"]) for one in requests]
    assert found == [COUNTS[:2], COUNTS[3:5]]
    assert [one["told"]["num_accepted_draft_tokens"] for one in requests] == [780, 300]


@pytest.mark.parametrize(
    "table",
    [
        (
            "| p | vLLM accepted | ik_llama.cpp accepted | vLLM drafted | ik_llama.cpp drafted |\n"
            "|-|-|-|-|-|\n| code | 240 | 210 | 330 | 300 |\n"
        ),
        (
            "p,accepted (vLLM),drafted (vLLM),accepted (ik_llama.cpp),drafted (ik_llama.cpp)\n"
            "code,240,330,210,300\n"
        ),
        (
            "| | vLLM | | ik_llama.cpp | |\n|-|-|-|-|-|\n| p | drafted | accepted |"
            " drafted | accepted |\n"
            "| code | 330 | 240 | 300 | 210 |\n"
        ),
    ],
    ids=["before", "after", "above"],
)
def test_engines_side_by_side_are_rows_of_their_own(tmp_path: Path, table: str) -> None:
    requests = _read(table, tmp_path).runs[0]["requests"]
    assert [one["engine"] for one in requests] == ["vllm", "ik_llama.cpp"]
    assert [[one["told"][name] for name in SUMS[2:]] for one in requests] == [
        [330, 240],
        [300, 210],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "“draft_n”: 8, “predicted_n”: 9, “predicted_ms”: 2.5, “draft_n_accepted”:\u200b 3",
        "draft_n          : 8\ndraft_n_accepted : 3\npredicted_n : 9\npredicted_ms : 2.5\n",
        "timings = {'predicted_n': 9, 'predicted_ms': 2.5, 'draft_n': 8, 'draft_n_accepted': 3}",
        '{"draft_n": 8, "draft_n_accepted": 3}\n',
        'usage: {"a": 1}\ntimings: {"draft_n": 8, "draft_n_accepted": 3, "draft_rounds": 4}\n',
    ],
    ids=["chat", "PowerShell", "Python", "picked", "named"],
)
def test_timings_as_people_paste_them(tmp_path: Path, text: str) -> None:
    told = _read(text, tmp_path).runs[0]["told"]
    assert (told["draft_n"], told["draft_n_accepted"]) == (8, 3)


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("170 t/s, accept 72.7%", 0.727),
        ("accepted 50% with n_max 4 and n_min 2", 0.5),
        ("acceptance rate is 0.44", 0.44),
        ("acceptance 80% for code, acceptance 44% for stories", None),
        ("acceptance 40-55%", None),
        ("acceptance threshold 0.09", None),
    ],
)
def test_a_rate_without_counts_is_a_rate_and_no_more(
    tmp_path: Path, line: str, rate: float | None
) -> None:
    if rate is None:
        assert recognise(line.encode()) is None
        return
    told = imported(tmp_path, f"On my card:\n\n- {line}\n").runs[0]["requests"][0]["told"]
    assert told["draft_acceptance_rate"] == pytest.approx(rate)
    assert told.get("draft_n") is told["num_accepted_draft_tokens"] is told["predicted_n"] is None


@pytest.mark.parametrize(
    "text",
    [
        "- name: d1\n  acceptance_rate: 0.81\n- name: d2\n  acceptance_rate: 0.71\n",
        '[{"config": "n2", "accept_rate": 0.81, "tok_s": 44.0}, {"accept_rate": 0.71}]',
        '{"spec_accept_rate": 0.81}\n{"spec_accept_rate": 0.71}\n',
    ],
    ids=["YAML", "JSON", "lines"],
)
def test_rates_alone_are_known_by_their_names(tmp_path: Path, text: str) -> None:
    requests = imported(tmp_path, text).runs[0]["requests"]
    assert [one["told"]["draft_acceptance_rate"] for one in requests] == [0.81, 0.71]


def test_columns_that_are_statistics_are_no_requests(tmp_path: Path) -> None:
    text = "| Metric | avg | min | p99 | std |\n|-|-|-|-|-|\n| Draft Acceptance Rate (%) | 60.00 "
    text += (
        "| 30.00 | 89.70 | 13.00 |\n| Acceptance Length (tokens/step) | 2.80 | 1.90 | 3.69 | 0.40 |"
    )
    run = imported(tmp_path, text).runs[0]
    assert len(run["requests"]) == 1
    told = run["told"] | {k: v for k, v in run["requests"][0]["told"].items() if v is not None}
    assert (told["draft_acceptance_rate"], told["mean_acceptance_length"]) == (0.6, 2.8)


@pytest.mark.parametrize(
    "text",
    [
        "prompt,n_drafted,n_accepted\ncode,300,210\nstory,310,155\n",
        '{"prompt":"code","n_drafted":300,"n_accepted":210}\n{"n_drafted":310,"n_accepted":155}\n',
        '{"a":[{"accepted":210,"rejected":90},{"accepted":155,"rejected":155}]}',
        "- p: a\n  n_drafted: 300\n  n_accepted: 210\n- n_drafted: 310\n  n_accepted: 155\n",
        "|n|acceptance|\n|-|-|\n|2|70.0% (210/300)|\n|3|0.5 (155 accepted / 310 generated)|",
    ],
    ids=["CSV", "lines", "JSON", "YAML", "cells"],
)
def test_counts_are_known_by_their_names(tmp_path: Path, text: str) -> None:
    requests = imported(tmp_path, text).runs[0]["requests"]
    assert [
        [one["told"][name] for name in ("num_accepted_draft_tokens", "num_draft_tokens")]
        for one in requests
    ] == [[210, 300], [155, 310]]


@pytest.mark.parametrize(
    "text",
    [
        "t,spec_decode_num_draft_tokens,spec_decode_num_accepted_tokens\n1,300,180\n2,660,400\n",
        "".join(
            f'{{"a:spec_decode_num_draft_tokens":{n},"spec_decode_num_accepted_tokens":{accepted}}}\n'
            for n, accepted in ((300, 180), (660, 400))
        ),
    ],
    ids=["CSV", "lines"],
)
def test_a_servers_counters_are_not_added_up(tmp_path: Path, text: str) -> None:
    told = imported(tmp_path, text).runs[0]["told"]
    assert (told["num_draft_tokens"], told["num_accepted_draft_tokens"]) == (660, 400)


@pytest.mark.parametrize(
    "prefix", ["llama-1  | ", "Nov 01 10:00:0{} box llama[812]: ", "2026-11-01T10:00:0{}Z stdout> "]
)
def test_an_object_may_go_on_over_lines_with_prefixes(tmp_path: Path, prefix: str) -> None:
    lines = ["{", '  "timings": {', '    "predicted_n": 9, "predicted_ms": 2.5,']
    lines += ['    "draft_n": 8, "draft_n_accepted": 3', "  }", "}"]
    text = "".join(f"{prefix.format(i)}{line}\n" for i, line in enumerate(lines))
    told = imported(tmp_path, text).runs[0]["told"]
    assert (told["draft_n"], told["draft_n_accepted"], told["predicted_n"]) == (8, 3, 9)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("`--draft-max 3`: 61.4 t/s, acceptance 0.72 (1210/1680)", (1680, 1210)),
        (" -- Draft: 410 tokens, accepted 301 (73.41%)", (410, 301)),
        ("accepted 1,810 of 2,600 drafted tokens, 69.6 %", (2600, 1810)),
        ("acceptance 0.73 (1210/1680)", None),  # other counts
        ("acceptance 50%: 20/40, later 60/120", None),
        ("Draft acceptance: 170 accepted / 250 generated", (250, 170)),
        ("greedy output; 18 draft tokens, 9 accepted.", (18, 9)),
        ("9 out of 18 drafted tokens were accepted", (18, 9)),
        ("10 draft tokens, 30 accepted", None),
        ("acceptance 0.4, 18 draft tokens, 9 accepted", None),
        ("tokens 301/410 (73.41%)", None),
    ],
)
def test_a_line_has_counts_that_make_its_rate(
    tmp_path: Path, line: str, counts: tuple[int, int] | None
) -> None:
    if counts is None:
        assert recognise(line.encode()) is None
    else:
        assert sums(imported(tmp_path, f"On my card:\n\n- {line}\n")) == [(None, None, *counts)]


def test_a_column_of_steps_without_counts_is_a_setting(tmp_path: Path) -> None:
    table = "bs | steps | num_draft | acc len mean/std\n--|--|--|--\n1 | 3 | 4 | 1.88/0.02\n"
    (one,) = imported(tmp_path, table).runs[0]["requests"]
    assert one["told"].get("num_spec_steps") is None
    assert one["told"]["mean_acceptance_length"] == 1.88


@pytest.mark.parametrize(
    "text",
    [
        "| model | size |\n|---|---|\n| a | 3 |\n",
        "| accepted | by |\n|---|---|\n| yes | me |\n",
        "it has 1,234 accepted,acceptance\nor 5,678 rejected,unknown\n",
        "a  acceptance\nb  3\n",
    ],
)
def test_other_tables_are_no_sums(text: str) -> None:
    assert recognise(text.encode()) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Per-position acceptance rate: 0.75, 0.5\nAvg Draft acceptance rate: 62.5%\n" * 2,
         [([0.75, 0.5], None, 0.625)] * 2),
        ("```\naccept len: 2.75, accept rate: 0.44   @ ~10,072 tok\n```\n", [(None, 2.75, 0.44)]),
    ],
)  # fmt: skip
def test_parts_of_a_line_that_were_copied_have_their_shares(
    tmp_path: Path, text: str, told: list[tuple[Any, ...]]
) -> None:
    found = [one["told"] for one in _read(text, tmp_path).runs[0]["requests"]]
    rates = [(one["acceptance_per_position"] or {}).get("unconditional") for one in found]
    names = "mean_acceptance_length", "draft_acceptance_rate"
    got = [(r, *(one[name] for name in names)) for r, one in zip(rates, found, strict=True)]
    assert got == told


def test_what_openvino_prints_has_accepted_tokens(tmp_path: Path) -> None:
    text = "MAIN MODEL\n  Num generated token: 200 tokens\n  Num accepted token: 119 tokens\n"
    text += "DRAFT MODEL\n  Num generated token: 324 tokens\n"
    (one,) = _read(text, tmp_path).runs[0]["requests"]
    assert [one["told"].get(name) for name in SUMS] == [200, None, None, None]
    assert one["told"]["num_accepted_draft_tokens"] == 119 and one["engine"] == "openvino"


def test_shares_of_all_positions_are_counts(tmp_path: Path) -> None:
    text = (
        "Total generated tokens: 900\nDrafts: 200\nDraft tokens: 400\nAccepted tokens: 240\n"
        "Per-position acceptance (%):\n  Position 0:   75.00\n  Position 1:   45.00\n"
    )
    told = _read(text, tmp_path).runs[0]["requests"][0]["told"]
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
    store = _read(json.dumps({"config": {}, "summary": summary, "results": samples}), tmp_path)
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
    store = _read("= DECODING STATISTICS (MTP)\n" + "\n".join(lines) + "\n", tmp_path)
    assert store.runs[0]["source"]["engine"] == "tensorrt-llm"
    told = store.runs[0]["requests"][0]["told"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"]) == (2.5, 0.6)
    assert [told.get(name) for name in SUMS] == [None] * 4


TGI = """HTTP/1.1 200 OK
content-type: text/plain

# TYPE tgi_request_skipped_tokens histogram
tgi_request_skipped_tokens_bucket{le="0"} 60
tgi_request_skipped_tokens_bucket{le="1"} 80
tgi_request_skipped_tokens_bucket{le="2"} 100
tgi_request_skipped_tokens_bucket{le="+Inf"} 100
tgi_request_skipped_tokens_sum 60
tgi_request_skipped_tokens_count 100
tgi_request_generated_tokens_sum 160
tgi_request_generated_tokens_count 10
"""


def test_counters_of_tgi(tmp_path: Path) -> None:
    """100 steps, of which 10 are those of prompts; how many tokens were drafted is not counted."""
    told = _read(TGI, tmp_path).runs[0]["requests"][0]["told"]
    assert told["num_accepted_draft_tokens"] == 60 and told["num_draft_tokens"] is None
    assert (told["predicted_n"], told["num_spec_steps"]) == (160, 90)
    assert told["num_accepted_tokens_per_pos"] == [40, 20]
    running = TGI.replace("tokens_sum 160", "tokens_sum 150")  # a request has not ended
    assert _read(running, tmp_path).runs[0]["requests"][0]["told"]["num_spec_steps"] is None
    plain = "tgi_request_skipped_tokens_sum 0\ntgi_request_skipped_tokens_count 100\n"
    with pytest.raises(TraceFileError, match="no token in them that was speculated"):
        _read(plain, tmp_path)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("      1: UINT32     |        1 | GGUF.version = 3\n", "GGUF file", "draftscope info"),
        ("llama_model_loader: - kv   0: general.architecture str = qwen35\n", "GGUF", "info"),
        ('{"data": [{"id": "a", "object": "model", "created": 1}]}', "models", "--model-name"),
        ('[{"id": 0, "n_ctx": 4096, "is_processing": false}]', "/slots", "/metrics"),
        ("seq_cp 0 1\n", "memory operations", "draftscope memory"),
        ("eval count:           298 token(s)\n", "ollama", "log"),
        ('{"generated_text": "abc", "details": {}}', "TGI", "/metrics"),
        ("Generation: 94 tokens, 139.4 tokens-per-sec\n", "mlx_lm", "oMLX"),
        ("[ Prompt: 25.1 t/s | Generation: 40.2 t/s ]\n", "llama-cli", "llama-server"),
        ("# TYPE vllm:num_requests_running gauge\n", "counters", "with speculation"),
    ],
)
def test_what_has_no_counts_is_named_with_what_to_bring(
    tmp_path: Path, text: str, what: str, remedy: str
) -> None:
    with pytest.raises(TraceFileError, match="which has no counts of drafted tokens") as caught:
        _read(text, tmp_path)
    assert what in caught.value.message and remedy in caught.value.remedy


def _counts(rows: list[tuple[int, int]]) -> str:
    lines = [f"| prompt {i} | {drafted} | {n} |" for i, (drafted, n) in enumerate(rows)]
    return "\n".join(["| a | drafted | accepted |", "|---|---|---|", *lines, ""])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(300, 200), (300, 2), (300, 190)], "In row 2 2 of 300 drafted tokens were accepted, in"),
        ([(300, 200), (300, 30), (300, 190)], ""),
        ([(300, 200), (60, 0), (300, 190)], ""),
        ([(300, 200)] * 4 + [(300, 0)] * 4,
         "From row 5 on 0 of 1,200 drafted tokens were accepted, before it 800 of 1,200 drafted"),
    ],
)  # fmt: skip
def test_rows_far_below_others(rows: list[tuple[int, int]], message: str, tmp_path: Path) -> None:
    found = find(imported(tmp_path, _counts(rows)))
    assert len(found) == bool(message) and all(message in one.message for one in found)


@pytest.mark.parametrize(
    ("speed", "rate", "n"), [(20.0, "88%", 1), (20.0, "40%", 0), (26.0, "88%", 0), (20.0, "—", 0)]
)
def test_rows_slower_than_the_one_without_drafts(
    speed: float, rate: str, n: int, tmp_path: Path
) -> None:
    rows = ("off", 26.7, "—"), ("on", speed, rate), ("on 2", 30.1, "61%")
    table = "| a | tok/s | acceptance |\n|---|---|---|\n"
    table += "".join(f"| {name} | {one} | {share} |\n" for name, one, share in rows)
    assert rules(imported(tmp_path, table)) == ["slower-than-plain"] * n


RATED = "| n | drafted | acceptance | tok/s |\n|---|---|---|---|\n| 2 | 300 | 0.71 | 41.0 |\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RATED, (300, None, 0.71, 41.0)),
        (RATED.replace("| n", "|| n").replace("|---|---|---|---|\n", ""), (300, None, 0.71, 41.0)),
        ("code: 168.4 ± 2.1 t/s, accept 71.2%\n", (None, None, 0.712, 168.4)),
        ("| opener | acceptance |\n|--|--|\n| short | 100 % (42/42) |\n", (42, 42, 1.0, None)),
        ("| | plain | MTP |\n|-|-|-|\n| acceptance, all | n/a | 3,971 / 5,840 = 68 % |\n",
         (5840, 3971, 3971 / 5840, None)),
        ("- drafted=41\n- accepted=33\n- accept_rate=80.5%\n- tok/s=35.1\n",
         (41, 33, 33 / 41, 35.1)),
        ("- fix, 512 gen: `18.0 tok/s`, `311/1010` draft tokens accepted.\n",
         (1010, 311, 311 / 1010, 18.0)),
        ("`attempts_total=1410`, `accepts_total=1180` → **83.7% acceptance**\n",
         (1410, 1180, 1180 / 1410, None)),
        ("runs:\n  - acceptance_rate: 0.8\n    tokens_per_second: 52.0\n", (None, None, 0.8, 52.0)),
        ("n_predict = 1,290\nn_drafted = 1,320\nn_accept  = 470\naccept    = 35,606%\n",
         (1320, 470, 470 / 1320, None)),
        (("timings   : @{prompt_n=31; predicted_n=220; predicted_ms=4059.04; "
         "predicted_per_second=54.2; draft_n=261; draft_n_accepted=140; id=a b}\n"),
         (261, 140, 140 / 261, 54.2)),
        (("Out[7]: CompletionUsage(completion_tokens=205, prompt_tokens=12, "
         "completion_tokens_details=Details(accepted_prediction_tokens=88, audio_tokens=None, "
         "rejected_prediction_tokens=32))\n"), (120, 88, 88 / 120, None)),
        ("- acceptance 100 %, batch 64, n_ctx 64\n", (None, None, 1.0, None)),
        ("| prompt | acceptance, std | acceptance |\n|-|-|-|\n| code | 0.12 | 0.71 |\n",
         (None, None, 0.71, None)),
        ("| Method | τ (mean accepted length) |\n|-|-|\n| EAGLE-2 | 3.94 |\n",
         (None, None, None, None)),
        (("[04:18:10] CtxLimit:2475/29214, Init:0.76s, Processed:2397 in 34.20s (70.09T/s), "
         "Generated:78/300 in 27.00s (2.89T/s), Total:61.96s\n"
         "(Draft Results - Success:41, Failure:20)\n"), (None, 41, None, 2.89)),
    ],
)  # fmt: skip
def test_what_people_write_of_acceptance(
    tmp_path: Path, text: str, expected: tuple[Any, ...]
) -> None:
    store = imported(tmp_path, text)
    told = store.runs[0]["requests"][-1]["told"]
    pairs = ("num_draft_tokens", "draft_n"), ("num_accepted_draft_tokens", "draft_n_accepted")
    counts = (told.get(name) or told.get(other) for name, other in pairs)
    rates = (told.get(name) for name in ("draft_acceptance_rate", "predicted_per_second"))
    assert (*counts, *rates) == pytest.approx(expected)
    assert not [one for one in find(store) if one.rule != "log-unread"]


def test_lines_of_one_request_are_together_and_no_sign_is_passed_over(tmp_path: Path) -> None:
    head = "2026-10-02T08:11:02.1Z  INFO xinfer::server::server: [Seq {}] "
    text = "".join(
        head.format(n) + said + "\n"
        for n in range(400)
        for said in (
            "⏱️ Prompt: 2048 tokens in 0.51s (4015.69 t/s)",
            "⏱️ Decoded: 412 tokens in 5.15s (80.00 t/s)",
            "MTP Speculation: steps=127 proposed=381 accepted=203 rate=53.3%",
        )
    )
    found = [one["told"] for one in imported(tmp_path, text).runs[0]["requests"]]
    names = ("prompt_n", "predicted_n", "num_spec_steps", "draft_n_accepted")
    assert [tuple(map(one.get, names)) for one in found] == [(2048, 412, 127, 203)] * 400
    for word, _ in REQUESTS:
        head = {"]": "MTP[1", ",": "CtxLimit:"}.get(word[0], "x")
        assert not says_nothing(shape_of(f"10:11:12 {head}{word}1"), 0), word
