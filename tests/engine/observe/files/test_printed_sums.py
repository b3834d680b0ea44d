"""Sums as benchmark programs print and keep them, and tables of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.observe.files.importing import recognise
from tests.engine.observe.files.pasted_text import SUMS, imported, read, rules, sums

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


@pytest.mark.parametrize("mark", ["│", "|"])
def test_the_console_table_of_aiperf(tmp_path: Path, mark: str) -> None:
    store = read(CONSOLE.replace("│", mark), tmp_path)
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
    requests = read(text, tmp_path).runs[0]["requests"]
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
    requests = read(f"My numbers:\n\n{table}\nwhy?\n", tmp_path).runs[0]["requests"]
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
    (one,) = read(table, tmp_path).runs[0]["requests"]
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
        "Prompt\tEntwürfe\tAngenommen\tRate\ncode\t1.300\t780\t60,0 %\nprose\t690\t300\t43,5 %\n",
        (
            "| p | drafted | accepted | t/s |\n|-|-|-|-|\n| code | 1,300 | 780 | 9.5 |\n"
            "| prose | 690 | 300 | 8 |\n"
        ),
        "p;drafted;accepted\ncode;1'300;780\nprose;690;300\n",
    ],
    ids=["blanks", "German", "French", "tabs", "English", "Swiss"],
)
def test_numbers_of_tables_are_read_as_they_are_written(tmp_path: Path, table: str) -> None:
    requests = read(table, tmp_path).runs[0]["requests"]
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
    requests = read(table, tmp_path).runs[0]["requests"]
    assert [one["engine"] for one in requests] == ["vllm", "ik_llama.cpp"]
    assert [[one["told"][name] for name in SUMS[2:]] for one in requests] == [
        [330, 240],
        [300, 210],
    ]
