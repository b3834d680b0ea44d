"""Sums of llama-server in the words of its builds, and the tables of mtp-bench."""

from __future__ import annotations

from typing import Any

import pytest

from engine.observe.files.importing import recognise
from tests.engine.observe.files.pasted_log import COUNTS, ROWS, read, rules, sums, told, with_times
from tests.support.golden_files import DATA


@pytest.mark.parametrize("name", ["default.log", "old-build.log"])
def test_a_default_log_is_a_run_of_sums(name: str) -> None:
    store = read((DATA / "logs" / name).read_bytes())
    expected = {"default.log": (20, 304, 306, 152, 153), "old-build.log": (3258, 57, 36, 36, 18)}
    assert told(store, *COUNTS) == [expected[name]]
    assert store.runs[0]["speculative_types"] == [
        {"default.log": "draft-mtp", "old-build.log": "mtp"}[name]
    ]
    assert not len(store.rounds) and not rules(store)
    assert "cache_n" not in {k for k, v in store.runs[0]["requests"][0]["told"].items() if v == 0}


def test_the_default_log_has_its_right_values() -> None:
    store = read((DATA / "logs" / "default.log").read_bytes())
    (request,) = store.runs[0]["requests"]
    assert (request["slot"], request["task"]) == (0, 0)
    assert request["told"]["num_accepted_tokens_per_pos"] == [92, 60]
    assert request["told"]["mean_acceptance_length"] == pytest.approx(1 + 152 / 153)
    assert (request["told"]["prompt_ms"], request["told"]["predicted_ms"]) == (300.11, 9296.72)
    assert [(n, tg) for _, n, tg, _ in request["record"]["speeds"]] == [(100, 31.44), (193, 31.11)]


SLOT = "slot print_timing: id {slot} | task {task} | "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # mean len with two digits leaves one number of drafts
            with_times("{head}draft acceptance = 0.50000 (   30 accepted /    60 generated), "
                       "mean len =  2.50\n"),
            (40, 101, 60, 30, 20),
        ),
        (  # without a mean and statistics the drafts are not known
            with_times("{head}draft acceptance = 0.50000 (   30 accepted /    60 generated)\n"),
            (40, 101, 60, 30, None),
        ),
        (  # rates by position in a line of their own
            with_times("{head}draft acceptance = 0.50000 (   30 accepted /    60 generated), "
                       "mean acceptance length =  2.50\n"
                       "{head}acc per pos = (0.700, 0.500, 0.300)\n"),
            (40, 101, 60, 30, 20),
        ),
        (  # a build of 2025: one entry of several lines
            "slot print_timing: id  2 | task 9 | \n" + with_times(
                "draft acceptance rate = 0.23026 (   70 accepted /   304 generated)\n", ""
            ),
            (40, 101, 304, 70, None),
        ),
        (  # the beginning is cut within a line
            ".003.004 I slot print_timing: id  1 | task 7 | n_decoded =    50, tg =  25.00 t/s\n"
            + with_times("{head}draft acceptance rate = 1.0 (   36 accepted /    36 generated)"),
            (40, 101, 36, 36, None),
        ),
        (  # nothing was drafted
            with_times("{head}      total time =    2120.50 ms /   141 tokens\n"),
            (40, 101, None, None, None),
        ),
        (  # nan, where nothing was generated
            with_times("draft acceptance rate = -nan (    0 accepted /     0 generated)\n"),
            (40, 101, 0, 0, None),
        ),
    ],
)  # fmt: skip
def test_words_of_other_builds(text: str, expected: tuple[int | None, ...]) -> None:
    for changed in (text, text.replace("\n", "\r\n"), text.encode("utf-16")):
        store = read(changed)
        assert told(store, *COUNTS) == [expected]
        assert not rules(store)


def statistics(name: str, calls: int, drafts: int, tokens: int, accepted: int) -> str:
    return (
        f"[53409] 4.48.313.675 I statistics {name}: #calls(b,g,a) = 1 {calls} {drafts}, "
        f"#gen drafts = {drafts}, #acc drafts = {drafts}, #gen tokens = {tokens}, "
        f"#acc tokens = {accepted}, dur(b,g,a) = 1.276, 1.457, 0.000 ms\n"
    )


def test_statistics_of_chained_drafters_are_summed_over_requests() -> None:
    head = "[53409] 4.48.313.649 I slot print_timing: id  0 | task {} | "
    one = with_times("[53409] draft acceptance rate = 0.6 (   90 accepted /   150 generated)\n",
                     "[53409] ").join([head.format(600) + "\n", ""])  # fmt: skip
    two = with_times("[53409] draft acceptance rate = 0.7 (   70 accepted /   100 generated)\n",
                     "[53409] ").join([head.format(689) + "\n", ""])  # fmt: skip
    text = (
        one
        + statistics("ngram-mod", 100, 2, 30, 20)
        + statistics("draft-mtp", 98, 40, 120, 70)
        + two
        + statistics("ngram-mod", 200, 3, 50, 35)
        + statistics("draft-mtp", 188, 67, 200, 125)
    )
    store = read(text)
    assert told(store, *COUNTS[2:]) == [(150, 90, 42), (100, 70, 28)]
    assert store.runs[0]["speculative_types"] == ["ngram-mod", "draft-mtp"]
    part = two + statistics("draft-mtp", 188, 67, 200, 125)  # what went before is not known
    assert told(read(part), *COUNTS[2:]) == [(100, 70, None)]
    new = statistics("draft-mtp", 60, 50, 150, 90), statistics("draft-mtp", 28, 28, 100, 70)
    counts = told(read(one + new[0] + two + new[1]), *COUNTS[2:])
    assert counts == [(150, 90, 50), (100, 70, 28)], "the second log is of another start"


def test_ik_llama_cpp_names_slots_at_the_end_of_a_line() -> None:
    line = (
        'INFO [           print_timings] {} | tid="1" timestamp=1777276256 id_slot={} id_task={}\n'
    )
    text = ""
    for slot, task, n in ((0, 3, 304), (1, 4, 204)):
        text += line.format("prompt eval time     =     300.11 ms /    20 tokens (..)", slot, task)
        text += line.format(f"generation eval time =  9296.72 ms /   {n} runs   (..)", slot, task)
        text += "draft acceptance rate = 0.88372 (  152 accepted /   172 generated)\n"
    store = read(text)
    assert told(store, *COUNTS[:4]) == [(20, 304, 172, 152), (20, 204, 172, 152)]
    assert [(r["slot"], r["task"]) for r in store.runs[0]["requests"]] == [(0, 3), (1, 4)]


def test_acceptance_lines_alone_are_a_request_each() -> None:
    text = "".join(
        f"draft acceptance rate = {a / d:.5f} ({a:5} accepted / {d:5} generated)\n"
        for a, d in ((5, 10), (0, 8), (7, 7))
    )
    store = read(text)
    assert told(store, "draft_n", "draft_n_accepted", "predicted_n", "prompt_n") == [
        (10, 5, None, None), (8, 0, None, None), (7, 7, None, None)
    ]  # fmt: skip
    assert sums(store) == (None, 25, 12, None)


@pytest.mark.parametrize(
    "line",
    [
        "draft acceptance = 0.90000 (   30 accepted /    60 generated)",
        "draft acceptance = 0.5 (30 accepted / 60 generated), mean len = 2.5, acc per pos = (1, 1)",
    ],
)
def test_sums_that_disagree_are_found(line: str) -> None:
    store = read(with_times("{head}" + line + "\n"))
    assert rules(store) == ["counters-contradict"]


def test_more_accepted_than_generated_is_not_read() -> None:
    store = read(with_times("{head}draft acceptance = 0.5 (  61 accepted /  60 generated)\n"))
    assert rules(store) == ["log-unread"]
    assert sums(store)[:3] == (101, None, None)


def table(rows: list[tuple[str, int, int, int, float]], total: int | None = None) -> str:
    text = "".join(
        ROWS.format(name=n, p=p, d=d, a=a, r=f"{a / d:.3f}" if d else "n/a", s=s)
        for n, p, d, a, s in rows
    )
    if total is None:
        return text
    return (
        text + f'\nAggregate: {{\n  "n_requests": 3,\n  "total_draft": {total},\n  "wall": 5\n}}\n'
    )


TABLE = [("code_python", 192, 153, 140, 103.2), ("summarize", 54, 48, 37, 70.5)]


def test_a_table_has_a_sequence_for_each_prompt() -> None:
    store = read((DATA / "logs" / "B1-mtpbench.txt").read_bytes())
    assert sums(store) == (438, 357, 316, None) and not rules(store)
    assert [r["prompt"] for r in store.runs[0]["requests"]] == [
        "code_python", "code_cpp", "summarize"
    ]  # fmt: skip
    assert told(store, "predicted_per_second") == [(103.2,), (94.4,), (70.5,)]


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        (table(TABLE), [(246, 201, 177)], []),
        (table(TABLE, 201) + table(TABLE, 201), [(246, 201, 177)] * 2, []),
        (table(TABLE) + table(TABLE), [(246, 201, 177)] * 2, []),
        (table(TABLE, 300), [(246, 201, 177)], ["log-lines-missing"]),
        (table(TABLE, 10**30), [(246, 201, 177)], ["log-unread"]),
        (table([("plain", 192, 0, 0, 30.0)]), [(192, 0, 0)], []),
        ("$ python3 mtp-bench.py\n" + table(TABLE, 201).replace("\n", "\r\n"),
         [(246, 201, 177)], []),
        (table(TABLE, 201).replace("\n", " ") * 2, [(246, 201, 177)] * 2, []),
        (table(TABLE).replace("0.771", "0.171"), [(192, 153, 140)], ["counters-contradict"]),
        (table(TABLE).replace("48", "4x"), [(246, None, None)], []),
    ],
)  # fmt: skip
def test_other_tables(text: str, expected: list[Any], found: list[str]) -> None:
    store = read(text)
    assert [sums(store, run)[:3] for run in store.runs] == expected
    assert rules(store) == found
    assert recognise(text.encode()) == "log"


IK = (
    "INFO [ print_timings] prompt eval time     = 120.50 ms /    40 tokens | id_slot=1 id_task=0\n"
    "INFO [ print_timings] generation eval time = 2000.00 ms /   101 runs | id_slot=1 id_task=0\n"
    "draft acceptance rate = 0.50000 (   30 accepted /    60 generated)\n"
)


def test_a_log_without_times_that_is_given_twice_is_two_requests() -> None:
    store = read(IK * 2)
    assert told(store, *COUNTS) == [(40, 101, 60, 30, None)] * 2
    assert sums(store) == (202, 120, 60, None)


def test_times_whose_head_is_cut_away_are_those_of_the_drafts_after_them() -> None:
    store = read(
        "prompt eval time =     120.50 ms /    40 tokens (    3.01 ms per token)\n"
        "       eval time =    2000.00 ms /   101 tokens (   19.80 ms per token)\n"
        "slot print_timing: id  2 | task 9 |\n"
        "draft acceptance rate = 0.50000 (   30 accepted /    60 generated)    <- this one\n"
    )
    assert told(store, *COUNTS) == [(40, 101, 60, 30, None)]
    assert [one["slot"] for one in store.runs[0]["requests"]] == [2]


def test_an_answer_without_drafts_between_others_has_drafted_none() -> None:
    """A server has no line of drafts that were not made."""
    done = "{head}stop processing: n_tokens = 140, truncated = 0\n"
    line = "{head}draft acceptance = 0.5 (   30 accepted /    60 generated), mean len =  2.50\n"
    log = [f"1.02.003.{i:03} I slot print_timing: id  0 | task {i} | " for i in range(3)]
    store = read(
        with_times(line + done, log[0]) + with_times(done, log[1]) + with_times(line + done, log[2])
    )
    assert told(store, *COUNTS[1:]) == [(101, 60, 30, 20), (101, 0, 0, 0), (101, 60, 30, 20)]
    assert sums(store) == (303, 120, 60, 40) and not rules(store)


def test_an_answer_whose_end_is_missing_has_no_count_and_no_finding() -> None:
    line = "{head}draft acceptance = 0.5 (   30 accepted /    60 generated), mean len =  2.50\n"
    store = read(
        "1.02.003.000 I spec common_specu: adding speculative implementation 'draft-mtp'\n"
        + with_times(line, "1.02.003.001 I slot print_timing: id  0 | task 1 | ")
        + with_times("", "1.02.003.002 I slot print_timing: id  0 | task 2 | ")
    )
    assert told(store, "draft_n") == [(60,), (None,)] and sums(store)[1] is None
    assert not rules(store)


HEAD = "slot   operator(): id  0 | task 0 | "


@pytest.mark.parametrize("end", ["", ", new n_tokens = 30"])
def test_rounds_that_say_0_of_all_drafts_are_not_observed(end: str) -> None:
    lines = [f"{HEAD}accepted  {a}/ 0 draft tokens{end}" for a in (2, 0, 1) * 40]
    text = (DATA / "logs" / "default.log").read_text()
    store = read("\n".join([*lines, text]))
    assert sums(store) == (304, 306, 152, 153)
    assert not len(store.rounds) and not rules(store)
