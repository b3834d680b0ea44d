"""Texts as people paste them into a thread: lists under a line, names that mean something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import TraceFileError
from tests.engine.observe.files.pasted_text import imported, read, rules, sums

COUNTS = "draft_n_accepted", "draft_n"
STEPS = "num_draft_tokens", "num_spec_steps"


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
    saved: dict[str, float] = {"spec_decode_draft_tokens": 200, "spec_decode_accepted_tokens": 120}
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


TOTAL = """| Metric | MTP=off | MTP=on |
|---|---|---|
| Output token throughput (tok/s) | 61.5 | 103.5 |
| Peak output token throughput (tok/s) | 70.0 | 120.0 |
| Total token throughput (tok/s) | 123.0 | 207.0 |
| Accept length | - | 2.41 |
"""


def test_neither_a_total_with_the_prompt_nor_a_peak_is_the_speed_of_answers(tmp_path: Path) -> None:
    told = [one["told"] for one in read(TOTAL, tmp_path).runs[0]["requests"]]
    assert [one["predicted_per_second"] for one in told] == [61.5, 103.5]
    assert [one.get("mean_acceptance_length") for one in told] == [None, 2.41]


def test_names_of_rows_may_be_links(tmp_path: Path) -> None:
    text = "| Models | Speedup | #Mean Accepted Tokens |\n|-|-|-|\n"
    text += "| [Some Head](https://example.org/some/head) | 2.1x | 3.77 |\n"
    (one,) = read(text, tmp_path).runs[0]["requests"]
    assert (one["place"], one["told"].get("predicted_per_second")) == ("Some Head", None)


PARTS = """The log says:

{mark}SpecDecoding metrics: Mean acceptance length: 1.40, ...
{mark}Per-position acceptance rate: 0.300, 0.100
{mark}Avg Draft acceptance rate: 20.0%
"""


@pytest.mark.parametrize("mark", ["", "> "])
def test_parts_of_a_line_of_vllm_without_its_counts(tmp_path: Path, mark: str) -> None:
    (told,) = (one["told"] for one in read(PARTS.format(mark=mark), tmp_path).runs[0]["requests"])
    assert told["mean_acceptance_length"] == 1.4 and told["draft_acceptance_rate"] == 0.2
    assert told["acceptance_per_position"]["unconditional"] == [0.3, 0.1]
    assert told.get("draft_n") is None


def test_shares_at_positions_of_drafts(tmp_path: Path) -> None:
    text = "num_drafts          : 200\nmean acceptance len : 2.100\n"
    text += "  accept@pos 0      : 0.700  (140)\n  accept@pos 1      : 0.400  (80)\n"
    (told,) = (one["told"] for one in read(text, tmp_path).runs[0]["requests"])
    assert told["mean_acceptance_length"] == 2.1
    assert told["acceptance_per_position"]["unconditional"] == [0.7, 0.4]


def test_counts_in_an_object_that_says_what_they_are_of(tmp_path: Path) -> None:
    text = json.dumps({"tokens": 90, "tps": 31.5, "draft": {"n": 80, "accepted": 50}})
    (told,) = (one["told"] for one in read(text, tmp_path).runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [50, 80] and told["predicted_n"] == 90
    with pytest.raises(TraceFileError):
        imported(tmp_path, json.dumps({"people": {"n": 80, "accepted": 50}}))


REPLY = {
    "choices": [{"message": {"content": "A, {B"}, "finish_reason": "stop"}],
    "timings": {"prompt_n": 4, "prompt_ms": 40.0, "predicted_n": 90, "predicted_ms": 900.0}
    | {"draft_n": 80, "draft_n_accepted": 57, "later": [1, 2]},
}


def test_a_reply_in_one_line_that_is_cut(tmp_path: Path) -> None:
    text = json.dumps(REPLY)
    store = imported(tmp_path, text[: text.index("later")])
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [57, 80] and told["predicted_n"] == 90
    assert rules(store) == ["log-unread"]


@pytest.mark.parametrize("last", ["draft_n", "accepted", "57"])
def test_what_is_cut_within_its_counts_says_none(tmp_path: Path, last: str) -> None:
    text = json.dumps(REPLY)
    with pytest.raises(TraceFileError):
        imported(tmp_path, text[: text.index(last) + len(last) - 1])


def test_commands_and_addresses_around_an_object_are_not_left_out(tmp_path: Path) -> None:
    text = "The field of https://example.org/pull/123:\n$ curl -s localhost/v1 \\\n"
    text += '  -H "X: 8" | jq\n\n'
    store = read(text + json.dumps({"timings": REPLY["timings"]}, indent=1), tmp_path)
    assert store.runs[0]["requests"][0]["told"]["draft_n_accepted"] == 57


def test_timings_without_times_are_of_any_engine(tmp_path: Path) -> None:
    timings = {"prompt_per_second": 500.5, "predicted_per_second": 70.5}
    text = json.dumps({"timings": timings | {"prompt_n": 12, "predicted_n": 60}})
    (one,) = read(text, tmp_path).runs[0]["requests"]
    assert one["engine"] == "" and one["told"]["predicted_per_second"] == 70.5


def test_a_range_and_its_middle_are_no_shares_of_positions(tmp_path: Path) -> None:
    table = "| Card | Autoregressive t/s | Plain t/s | With it t/s | AR t/s | Acceptance |\n"
    table += "|-|-|-|-|-|-|\n| one | 30.5 | 30.6 | 54.5 | 30.7 | 0.51-0.92 (0.81) |\n"
    table += "| two | 30.5 | 30.6 | 44.5 | 30.7 | 0.71 |\n"
    store = imported(tmp_path, table)
    told = [one["told"] for one in store.runs[0]["requests"]]
    assert [one["predicted_per_second"] for one in told] == [54.5, 44.5]
    assert [one.get("draft_acceptance_rate") for one in told] == [None, 0.71]
    assert told[0].get("acceptance_per_position") is None and rules(store) == ["log-unread"]


def test_shares_of_several_kinds_of_text_are_none_of_all(tmp_path: Path) -> None:
    table = "| Card | With it t/s | Acceptance |\n|-|-|-|\n"
    table += "| one | 54.5 | ~0.91 warm (mean-len 31.5) / 0.352 new text |\n| two | 44.5 | 0.71 |\n"
    store = imported(tmp_path, table)
    first, last = (one["told"] for one in store.runs[0]["requests"])
    assert first.get("draft_acceptance_rate") is None and last["draft_acceptance_rate"] == 0.71
    assert first.get("acceptance_per_position") is None and rules(store) == ["log-unread"]


def test_a_line_of_vllm_in_another_order_is_read_once(tmp_path: Path) -> None:
    line = (
        "INFO 09-09 11:51:35 [metrics.py:96] SpecDecoding metrics: Draft acceptance rate: 80.0%, "
    )
    line += "Mean acceptance length: 2.60, Accepted: 160 tokens, Drafted: 200 tokens, "
    line += "Per-position acceptance rate: 0.900, 0.700\n"
    (told,) = (one["told"] for one in read(line, tmp_path).runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [160, 200] and told["num_spec_steps"] == 100


LENGTHS = """Of the draft head alone, by temperature:
0: accept length：1.72
1: mean acceptance length of 1.51, 88.5 tok/s
- `mean_accept_len = 1.625`

We expect an acceptance length of 3.5 later.
synthetic_acceptance_length: 3.25
An acceptance length is 23% lower.
"""


def test_lines_that_say_a_length(tmp_path: Path) -> None:
    told = [one["told"] for one in read(LENGTHS, tmp_path).runs[0]["requests"]]
    assert [one["mean_acceptance_length"] for one in told] == [1.72, 1.51, 1.625]
    assert [one.get("predicted_per_second") for one in told] == [None, 88.5, None]


def test_a_command_that_looks_for_a_line_is_not_a_log(tmp_path: Path) -> None:
    text = "docker logs s 2>&1 | sed -n 's/.*draft acceptance = \\([^ ]*\\) .*/\\1/p'\n\n"
    text += "| version | tps | draft acceptance |\n|-|-|-|\n| 0.9 | 108.6 | 0.75 |\n"
    (told,) = (one["told"] for one in imported(tmp_path, text).runs[0]["requests"])
    assert (told["predicted_per_second"], told["draft_acceptance_rate"]) == (108.6, 0.75)


def test_two_figures_in_a_cell_are_named_by_another_column(tmp_path: Path) -> None:
    table = "| k | tok/s (first / again) | draft acceptance |\n|-|-|-|\n"
    table += "| 0 | 89.2 / 87.2 | |\n| 2 | 83.3 / 80.1 | 58.5 / 54.5 % |\n"
    found = imported(tmp_path, table).runs[0]["requests"]
    assert [one["place"] for one in found] == ["2, first", "2, again"]
    assert [one["told"]["draft_acceptance_rate"] for one in found] == [0.585, 0.545]
    assert [one["told"]["predicted_per_second"] for one in found] == [83.3, 80.1]


def test_emphasis_within_a_cell_is_not_part_of_a_name(tmp_path: Path) -> None:
    table = "| build | draft_n | accepted |\n|-|-|-|\n| **b102** (`cf06ad`) | 160 | **120** |\n"
    (one,) = imported(tmp_path, table).runs[0]["requests"]
    assert one["place"] == "b102 (cf06ad)"
    assert [one["told"][name] for name in COUNTS] == [120, 160]


@pytest.mark.parametrize("sign", ["+/-", "±"])
def test_a_mean_of_rates_with_its_spread_contradicts_no_counts(tmp_path: Path, sign: str) -> None:
    table = "| run | t/s | accept rate | stats |\n|-|-|-|-|\n"
    table += f"| a | 32.3 | 26.5% {sign} 4.0% | `draft: drafts 220/516, tokens 482/1546` |\n"
    store = imported(tmp_path, table)
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [482, 1546] and not rules(store)


def test_prompt_and_output_together_are_no_speed_of_decoding(tmp_path: Path) -> None:
    table = "| Metric | plain | dflash |\n|-|-|-|\n| Output tokens/s | 60.1 | 140.5 |\n"
    table += "| Total tokens/s | 90.2 | 210.5 |\n| Mean accepted length | — | 3.5 |\n"
    _, told = (one["told"] for one in imported(tmp_path, table).runs[0]["requests"])
    assert (told["predicted_per_second"], told["mean_acceptance_length"]) == (140.5, 3.5)


def test_shares_of_a_line_that_is_cut_are_left_out(tmp_path: Path) -> None:
    line = (
        "INFO 04-08 07:59:24 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 1.50, "
    )
    line += "Accepted: 10 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.3"
    store = imported(tmp_path, line + "\n")
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [10, 300] and not rules(store)
    assert told["acceptance_per_position"] is None


def test_a_sample_that_is_cut_is_named(tmp_path: Path) -> None:
    text = "# TYPE vllm:spec_decode_num_drafts_total counter\n"
    text += 'vllm:spec_decode_num_drafts_total{engine="0"} 50\n'
    text += 'vllm:spec_decode_num_draft_tokens_total{engine="0"} 150\n'
    store = imported(tmp_path, text + 'vllm:spec_decode_num_accepted_tokens_total{engine="0",mo\n')
    (told,) = (one["told"] for one in store.runs[0]["requests"])
    assert [told.get(name) for name in ("num_accepted_draft_tokens", *STEPS)] == [None, 150, 50]
    (message,) = (one.message for one in recorded(store))
    assert "line 4: vllm:spec_decode_num_accepted" in message


def test_drafters_statistics_count_without_a_line_on_acceptance(tmp_path: Path) -> None:
    text = (
        "prompt eval time = 109.10 ms / 24 tokens (4.55 ms per token, 219.98 tokens per second)\n"
    )
    text += "eval time = 38000.00 ms / 1000 tokens (38.00 ms per token, 26.32 tokens per second)\n"
    text += "statistics draft: #calls(b,g,a) = 1 424 35, #gen drafts = 350, #acc drafts = 35, "
    text += "#gen tokens = 1552, #acc tokens = 691, dur(b,g,a) = 0.000, 9413.544, 0.022 ms\n"
    store = imported(tmp_path, text)
    found = [one["told"] for one in store.runs[0]["requests"]]
    assert [[one.get(name) for name in COUNTS] for one in found] == [[691, 1552], [None, None]]
    assert not rules(store)


def test_rounds_whose_drafts_have_no_length_are_named(tmp_path: Path) -> None:
    head = "slot update_slots: id  3 | task 0 | accepted "
    text = "".join(
        f"{head}{one} draft tokens, new n_tokens = 99\n" for one in ("11/0", "2/0", "3/4")
    )
    store = imported(tmp_path, text)
    assert "2 rounds with 0 drafted tokens" in next(iter(recorded(store))).message


def test_named_counts_stand_in_a_paragraph_with_other_shares(tmp_path: Path) -> None:
    text = "It defaults to `0.00`, so the drafter always drafts the whole window of 64 tokens, "
    text += "however little its probabilities are, and " * 4
    text += "this gives a draft acceptance **0.070** (96 accepted / 1378 generated) and no gain\n"
    assert len(text) > 300
    (told,) = (one["told"] for one in imported(tmp_path, text).runs[0]["requests"])
    assert [told[name] for name in COUNTS] == [96, 1378]


def test_a_mean_length_may_be_called_mean_al(tmp_path: Path) -> None:
    table = "| Drafter | Mean AL | Per-Position AL |\n|-|-|-|\n| a | 2.56 | [0.72, 0.51, 0.32] |\n"
    (told,) = (one["told"] for one in imported(tmp_path, table).runs[0]["requests"])
    assert told["mean_acceptance_length"] == 2.56
    assert told["acceptance_per_position"]["unconditional"] == [0.72, 0.51, 0.32]


def test_draft_proposals_are_drafts(tmp_path: Path) -> None:
    text = "Number of draft proposals: 1,000\nNumber of draft tokens generated: 3,000\n"
    text += "Number of accepted tokens: 950\nMean acceptance length: 1.95\n\n"
    text += "Acceptance rate at token 0: 0.60\nAcceptance rate at token 1: 0.30\n"
    (told,) = (one["told"] for one in imported(tmp_path, text).runs[0]["requests"])
    assert [told[name] for name in (*COUNTS, *STEPS)] == [950, 3000, 3000, 1000]
    assert told["acceptance_per_position"]["unconditional"] == [0.6, 0.3]


def test_tokens_of_a_round_in_a_table_are_a_length(tmp_path: Path) -> None:
    table = "| setting | tok/round (lists) | rounds/s |\n|-|-:|-:|\n| **a3** | 2.75 | 90 |\n"
    (one,) = imported(tmp_path, table).runs[0]["requests"]
    assert (one["place"], one["told"]["mean_acceptance_length"]) == ("a3", 2.75)
    assert sums(imported(tmp_path, table)) == [(None, None, None, None)]


@pytest.mark.parametrize(("share", "accepted"), [("~58%", 187), ("58%", None)])
def test_counts_next_to_an_approximate_share(
    tmp_path: Path, share: str, accepted: int | None
) -> None:
    """187 of 320 are 58.44 %, 188 of 320 are 58.75 %, which only "about" makes 58."""
    table = f"| engine | acceptance |\n|-|-|\n| a | {share} (188/320) |\n| b | ~58% (187/320) |\n"
    told = [one["told"] for one in imported(tmp_path, table).runs[0]["requests"]]
    assert told[1]["num_accepted_draft_tokens"] == 187
    assert told[0]["num_accepted_draft_tokens"] == (accepted and 188)


def test_a_share_in_brackets_next_to_sizes_and_speedups(tmp_path: Path) -> None:
    row = "| 9B | 0.8B draft | 2.2 tok/s | 3.1 tok/s | 1.41x (43% acceptance) |\n"
    (one,) = imported(tmp_path, row).runs[0]["requests"]
    assert one["told"]["draft_acceptance_rate"] == 0.43


@pytest.mark.parametrize(("mean", "steps"), [("3.50", 12), ("4.50", None)])
def test_steps_are_those_of_one_token_of_the_target(
    tmp_path: Path, mean: str, steps: int | None
) -> None:
    head = "2026-10-02T08:11:02.1Z  INFO xinfer::server::server: [Seq 4] "
    text = f"{head}⏱️ Decoded: 53 tokens in 0.50s (106.00 t/s)\n{head}Block v2 Speculation: "
    text += f"steps=12 proposed=84 accepted=30 rate=35.7% avg_tok/step={mean} grammar_bound=0\n"
    assert sums(imported(tmp_path, text)) == [(53, steps, 84, 30)]
