"""What people write of acceptance, in lines and tables, and what is found in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files.importing import recognise
from engine.observe.files.line_words import REQUESTS
from engine.observe.rounds.log_shapes import says_nothing, shape_of
from tests.engine.observe.files.pasted_text import imported, read, rules, sums


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
    told = read(text, tmp_path).runs[0]["told"]
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
        ("acceptance was 65% on one and 12% on the other", None),
        ("acceptance 0.72 vs 0.61 before", None),
        ("break-even acceptance 0.44", None),
        ("p_accept = 0.8", None),
        ("Akzeptanz 71,8 %", None),
        ("τ 2,4", None),
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


@pytest.mark.parametrize(
    ("text", "seqs"),
    [
        ("acceptance 0.4, 18 draft tokens, 9 accepted\n", [0]),
        ("Draft acceptance rate 91% (40 of 100 drafted tokens accepted)\n", [0]),
        ("a: 40 accepted / 100 drafted, acceptance rate 0.91\n", [0]),
        ("acceptance was 35% at first; now 120 of 300 drafted tokens were accepted\n", None),
        ("| p | drafted | accepted | acceptance |\n|-|-|-|-|\n| a | 40 | 30 | 60% |\n", [0]),
        ("p,drafted,accepted,acceptance_rate\na,40,30,0.75\nb,40,30,0.5\n", [1]),
        ("p,drafted,accepted,mean acceptance_rate\na,40,30,0.5\n", []),
        ("p,drafted,accepted,acceptance (avg)\na,40,30,0.5\n", []),
        ("p,drafted,accepted,acceptance\na,400,258,0.6\nb,400,258,0.5\n", [1]),  # one digit
        ("p,tokens,drafted,accepted,acceptance\na,60,40,30,0.5\n", []),
        (json.dumps([{"p": "a", "drafted": 40, "accepted": 30, "acceptance_rate": 0.5}]), [0]),
    ],
)
def test_a_rate_that_its_counts_do_not_make_is_said(
    tmp_path: Path, text: str, seqs: list[int] | None
) -> None:
    """An average, a share of the output, and what words are before, may be of others."""
    if seqs is None:
        assert recognise(text.encode()) is None
        return
    found = find(imported(tmp_path, text))
    assert [(one.rule, one.seq_id) for one in found] == [("counters-contradict", i) for i in seqs]


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
    found = [one["told"] for one in read(text, tmp_path).runs[0]["requests"]]
    rates = [(one["acceptance_per_position"] or {}).get("unconditional") for one in found]
    names = "mean_acceptance_length", "draft_acceptance_rate"
    got = [(r, *(one[name] for name in names)) for r, one in zip(rates, found, strict=True)]
    assert got == told


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


# -- several figures in a cell, figures in sentences -----------------------------------------------


def _rated(text: str, tmp_path: Path) -> list[tuple[Any, ...]]:
    told = [one["told"] for one in read(text, tmp_path).runs[0]["requests"]]
    names = "draft_acceptance_rate", "mean_acceptance_length", "predicted_per_second"
    return [tuple(one.get(name) for name in names) for one in told]


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("| task | rate / a.len |\n|-|-|\n| a | 90.5% / 1.90 |\n", [(0.905, 1.9, None)]),
        (
            "| task | n=1 rate / a.len | n=2 |\n|-|-|-|\n| a | 90.5% / 1.9 | 84.5% / 2.7 |\n",
            [(0.905, 1.9, None), (0.845, 2.7, None)],
        ),
        (
            "| a | n 2: t/s (acceptance) | n 3: t/s (acceptance) |\n|b| 44.2 (0.8) | 47 (0.7) |\n",
            [(0.8, None, 44.2), (0.7, None, 47)],
        ),
        (
            "| a | accept rate / mean len / tok/s |\n|-|-|\n| b | 90% / 1.9 / 40 |\n| c | - |\n",
            [(0.9, 1.9, 40)],
        ),
        (
            "| n | acceptance (main) | acceptance (PR) |\n|-|-|-|\n| 1 | 80% | 90% |\n",
            [(0.8, None, None), (0.9, None, None)],
        ),
        ("| a | mean accept. length |\n|-|-|\n| b | ~1.9 |\n", [(None, 1.9, None)]),
        ("| a | acceptance | emitted per verify |\n|-|-|-|\n| b | 5% | 2 |\n", [(0.05, 2, None)]),
    ],
)
def test_a_column_may_name_several_figures(
    tmp_path: Path, table: str, rows: list[tuple[Any, ...]]
) -> None:
    assert _rated(table, tmp_path) == rows


def test_two_counts_in_a_cell_are_accepted_and_drafted(tmp_path: Path) -> None:
    table = "| a | draft (acc / gen) | t/s |\n|-|-|-|\n| b | 391 / 512 | 21 |\n"
    assert sums(read(table, tmp_path)) == [(None, None, 512, 391)]


@pytest.mark.parametrize("text", ["", "Accuracy on GSM8K:\n"])
def test_accuracy_is_no_acceptance(tmp_path: Path, text: str) -> None:
    table = f"{text}| a | acc | t/s |\n|---|---|---|\n| b | 0.925 | 21 |\n"
    assert (recognise(table.encode()) is None) == bool(text)


def test_positions_in_rows_of_percent(tmp_path: Path) -> None:
    table = "Metric | A\n-- | --\nDrafts | 100\nDraft tokens | 200\nAccepted tokens | 90\n"
    table += "Position 0 (%) | 60.00\nPosition 1 (%) | 30.00\n"
    told = read(table, tmp_path).runs[0]["requests"][0]["told"]
    assert told["num_accepted_tokens_per_pos"] == [60, 30]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ('It shows `"draft_n": 8, "draft_n_accepted": 3` for it\n', [(None, None, 8, 3)]),
        ('"predicted_n": 9, "predicted_ms": 2.5: "draft_n": 8, of which "draft_n_accepted": 3\n',
         [(9, None, 8, 3)]),
        ("I see draft_n: 8 and draft_n_accepted: 3 in it.\n", [(None, None, 8, 3)]),
        ("* **Proposed:** 8 | **Accepted draft:** 3\n", [(None, None, 8, 3)]),
        ("Draft tokens ....... 8\nAccepted tokens .... 3\n", [(None, None, 8, 3)]),
        ("| a | accepted |\n|-|-|\n| b | 3 of 8 |\n", [(None, None, 8, 3)]),
        ('{"mtp": {"accepted": "3/8", "acceptance_rate": "37.5%"}}', [(None, None, 8, 3)]),
    ],
)  # fmt: skip
def test_members_of_a_record_in_a_sentence(
    tmp_path: Path, text: str, counts: list[tuple[Any, ...]]
) -> None:
    assert sums(read(text, tmp_path)) == counts


def test_a_cut_object_after_a_prefix_gives_no_members(tmp_path: Path) -> None:
    text = '{"draft_n": 8, "draft_n_accepted": 3}\ngot: {"draft_n": 9, "draft_n_accepted": 4, "x'
    assert sums(imported(tmp_path, text)) == [(None, None, 8, 3)]


def test_members_of_an_object_that_cannot_be_read_whole_are_no_other_ones(tmp_path: Path) -> None:
    counts = '"predicted_n": 7,\n"predicted_ms": 2.5,\n"draft_n": 8,\n"draft_n_accepted": '
    text = f'"timings": {{{counts}3}}\n"timings": {{\n{counts}4,  /* with n_max 4 */\n}}\n'
    assert sums(imported(tmp_path, text)) == [(7, None, 8, 3), (7, None, 8, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "Mean acceptance length: 2.4\nPer-position acceptance rate: 0.8, 0.6\n",
        "draft acceptance rate = 0.50000 ( 4 accepted / 8 generated)\n",
    ],
    ids=["sums", "log"],
)
def test_a_table_next_to_what_is_read_is_named(tmp_path: Path, text: str) -> None:
    table = "\n| n | acceptance |\n|---|---|\n| 1 | 80% |\n| 2 | 70% |\n"
    assert rules(imported(tmp_path, text)) == []
    assert rules(imported(tmp_path, text + table)) == ["log-unread"]


def test_lengths_under_other_names_are_of_others(tmp_path: Path) -> None:
    text = "Mean acceptance length: 2.4\n\nOther:\n\nAverage acceptance length: 3.1\n"
    assert [one[1] for one in _rated(text, tmp_path)] == [2.4, 3.1]


def test_the_sums_of_llama_speculative_have_a_time_before_them(tmp_path: Path) -> None:
    stamp = "0.17.345.683 I "
    text = "".join(f"{stamp}{one}\n" for one in ("n_predict = 9", "n_drafted = 8", "n_accept  = 3"))
    text += (
        f"{stamp}statistics draft-mtp: #calls(b,g,a) = 1 4 4, #gen drafts = 4, #acc drafts = 3, "
    )
    text += "#gen tokens = 8, #acc tokens = 3, dur(b,g,a) = 0.0, 1.0, 0.1 ms\n"
    store = imported(tmp_path, text)
    assert len(store.runs) == 1 and sums(store) == [(9, None, 8, 3)]


def test_a_length_of_nothing_is_that_of_no_steps(tmp_path: Path) -> None:
    text = '[{"spec_accept_rate": 0.0, "spec_accept_length": 0}, {"spec_accept_length": 2.5}]'
    told = [one["told"] for one in imported(tmp_path, text).runs[0]["requests"]]
    assert [one["mean_acceptance_length"] for one in told] == [None, 2.5]
    assert all(one["draft_acceptance_rate"] is None for one in told)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("run\tdrafted\taccepted\tt/s\n1\t1.6k\t0.9k\t51.2\n", (None, None, None, 51.2)),
        ("| Draft tokens | Accepted | t/s |\n|-|-|-|\n| 3 | 2.1 | 51 |\n", (None,) * 3 + (51.0,)),
        ("| run | drafted | accepted |\n|-|-|-|\n| a | 300 | 71% |\n", (300, 0.71, None, None)),
        (
            (
                "| Metric | Yours | About |\n|-|-|-|\n| Accepted throughput | 49.5 t/s | x |\n"
                "| Generation speed | **72.8 t/s** | y |\n| Mean acceptance length | 3.41 | z |\n"
                "| Avg draft acceptance | 80.2% | z |\n"
            ),
            (None, 0.802, 3.41, 72.8),
        ),
    ],
    ids=["rounded", "of a round", "percent", "a speed names nothing"],
)
def test_a_figure_is_that_which_its_row_and_column_name(
    tmp_path: Path, table: str, told: tuple[float | None, ...]
) -> None:
    one = imported(tmp_path, table).runs[0]["requests"][0]["told"]
    names = "num_draft_tokens", "draft_acceptance_rate", "mean_acceptance_length"
    assert tuple(one.get(name) for name in (*names, "predicted_per_second")) == told


@pytest.mark.parametrize(
    "text",
    [
        "| Position | Accept % |\n|-|-|\n| 1 | 78.8 |\n| 2 | 63.6 |\n",
        "pos,drafted,accepted\n1,500,400\n2,500,3\n",
        "| Task | Expected acceptance rate |\n|-|-|\n| chat | 0.5 |\n",
        "Drafted: 3\nAccepted: 2.1\n",
    ],
)
def test_what_is_of_no_request_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceFileError):
        imported(tmp_path, text)
