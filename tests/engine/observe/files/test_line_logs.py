"""Logs as people paste them: prefixes, several servers, intervals of vLLM and SGLang, parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files import records
from engine.observe.files.importing import import_file, recognise
from engine.observe.files.log_run import _lost_rounds
from engine.observe.rounds.log_rounds import LogRequest, LogRound
from engine.trace.store import TraceStore
from engine.trace.timings import summary
from tests.engine.observe.files.pasted_log import read, rules, sums, told, with_times
from tests.support.captures import load
from tests.support.golden_files import DATA

CASES = Path(__file__).parents[5] / "shared" / "cases"


# -- prefixes, several servers, several starts -------------------------------------------------

LIGHT = "plain.log"
EXPECTED = (25, 36, 12)


def light() -> list[str]:
    return (DATA / "logs" / LIGHT).read_text().splitlines()


@pytest.mark.parametrize(
    "prefix",
    [
        "[53409] ",
        "llama-1  | ",
        "2026-08-15T19:02:{s:02}.{i:06}Z ",
        "2026-08-15T19:02:{s:02}+0200 box llama-server[2211]: ",
        "Aug 15 19:02:{s:02} box systemd[1]: llama-server[2211]: ",
        "<14>1 2026-08-15T19:02:{s:02}.1Z box llama 2211 - - ",
        "2026-08-15T19:02:{s:02}.{i:09}Z stderr F ",
        "[pod/llama-7d9fb-x2x/llama] ",
        "12:10:{s:02}.384stderr ",
        "12:10PM DBG GRPC(model-127.0.0.1:36541): stderr ",
        "{i}:",
        "server.log:{i}:",
        "> ",
        "    ",
        "1755284{i:03}.123456 ",
        "2026/08/15 19:02:{s:02} INFO llama: ",
        "[   12.{i:06}] ",
    ],
)
def test_a_prefix_changes_nothing(prefix: str) -> None:
    lines = [prefix.format(i=i + 1, s=i % 60) + line for i, line in enumerate(light())]
    store = read("\n".join(lines))
    assert len(store.runs) == 1 and len(store.rounds) == 13
    assert sums(store)[:3] == EXPECTED and not rules(store)
    assert recognise("\n".join(lines).encode()) == "log"


def test_children_of_a_router_are_runs_of_their_own() -> None:
    store = read((DATA / "logs" / "two-children.log").read_bytes())
    assert [sums(store, run)[:3] for run in store.runs] == [EXPECTED] * 2
    assert [facts["server"]["address"] for facts in store.runs.values()] == ["53409", "53410"]
    router = ["0.00.000.001 I srv  llama_server: initializing ..."]
    mixed = [*router, *(f"[1] {line}" for line in light()), "0.00.100.000 I srv  stop: x"]
    assert [sums(read("\n".join(mixed)))[:3]] == [EXPECTED]


def test_starts_of_a_server_are_runs_of_their_own() -> None:
    store = read("\n".join([*light(), *light()]))
    assert [sums(store, run)[:3] for run in store.runs] == [EXPECTED] * 2
    middle = [line for line in light() if " slot " in line]  # neither says that it starts
    assert len(
        read("\n".join([*middle, "9.00.000.000 I slot x: id  0 | task 1 | y", *middle])).runs
    )


def test_other_programs_between_the_lines_change_nothing() -> None:
    lines = [f"llama-1  | {line}" for line in light()]
    for i in range(len(lines), 0, -3):
        lines.insert(i, "postgres-1  | 2026-08-15 19:02:11.123 UTC [1] LOG:  checkpoint starting")
    store = read("\n".join(lines))
    assert sums(store)[:3] == EXPECTED and not rules(store)


def test_a_log_without_times_has_rounds_without_times() -> None:
    lines = [line.split(" ", 2)[2] for line in light()]
    store = read("\n".join(lines))
    assert sums(store)[:3] == EXPECTED and len(store.rounds) == 13
    assert all(store.rounds.row(i)["t_ms"] is None for i in range(13))
    lines.insert(len(lines) // 2, "the answer came at 0.00.001.001 I think")
    assert sums(read("\n".join(lines)))[:3] == EXPECTED


@pytest.mark.parametrize(
    ("n", "rule"),
    [(7, "counters-contradict"), (6, "counters-contradict"), (20, "log-lines-missing")],
)
def test_sums_are_wrong_where_every_token_is_in_a_round(n: int, rule: str) -> None:
    rounds = [LogRound(pos, 3, k, is_complete=True) for pos, k in ((3, 3), (7, 1))]
    request = LogRequest(0, 0, first=(5, "x"), rounds=rounds, predicted=n, drafted=9, accepted=4)
    found = _lost_rounds(request)
    assert found is not None and found["rule"] == rule and "4 of 9" in found["evidence"]
    request.drafted = 6
    assert _lost_rounds(request) is None


def test_missing_lines_are_said_and_no_engine_is_accused() -> None:
    light_part = [line for i, line in enumerate(light()) if "accepted  1/ 3" not in line]
    store = read("\n".join(light_part))
    assert rules(store) == ["log-lines-missing"]
    assert sums(store)[:3] == EXPECTED
    verbose = (DATA / "logs" / "verbose-plain.log").read_text().splitlines()
    tokens = [i for i, line in enumerate(verbose) if "next token" in line]
    for left_out in ([tokens[3]], tokens[4:9], [tokens[-1]]):
        kept = [line for i, line in enumerate(verbose) if i not in left_out]
        store = read("\n".join(kept))
        assert "counters-contradict" not in rules(store)
        assert ("log-lines-missing" in rules(store)) == (left_out[0] != tokens[-1])
    positions = [row["pos0"] for i in range(len(store.rounds)) for row in [store.rounds.row(i)]]
    assert positions[1:] == sorted(positions[1:])


@pytest.mark.parametrize(
    "is_kept",
    [
        lambda line: " | task " in line or "draft candidate" in line or "called impl" in line,
        lambda line: re.search(r"n_gen = +2", line) is None,
        lambda line: re.search(r"n_gen = +[3579],", line) is None,
        lambda line: re.search(r"n_gen = +[6-9]\d,", line) is None,
    ],
)
def test_rounds_have_their_places_and_lengths_without_the_lines_of_some_tokens(
    is_kept: Callable[[str], bool],
) -> None:
    def rounds(lines: list[str]) -> list[tuple[Any, ...]]:
        store = read("\n".join(lines))
        assert not {"acceptance-counting", "counters-contradict"} & set(rules(store))
        names = "num_accepted_draft_tokens", "pos0", "num_emitted", "rollback_depth"
        rows = map(store.rounds.row, range(len(store.rounds)))
        return [tuple(map(row.get, names)) for row in rows if row.get(names[0]) is not None]

    lines = load("mtp").log.split("\n")
    kept = [line for line in lines if is_kept(line)]
    assert len(kept) < len(lines) and rounds(kept) == rounds(lines)


def test_lines_filtered_to_accepted_ones_are_rounds() -> None:
    kept = [line for line in light() if "accepted " in line and "draft tokens" in line]
    store = read("\n".join(kept))
    assert (len(store.rounds), *sums(store)[1:3]) == (13, 36, 12)


def test_a_build_that_tells_rounds_in_other_words() -> None:
    text = "".join(
        f"slot update_slots: id  3 | task 0 | accepted {a}/{d} draft tokens, new n_tokens = 700\n"
        for a, d in ((1, 16), (2, 16), (16, 16), (3, 4))
    )
    store = read(text)
    assert sums(store)[1:3] == (52, 22) and not rules(store)


def test_lines_that_look_like_an_engines_are_counted() -> None:
    lines = [
        *light(),
        "0.02.000.000 I slot print_timing: id  0 | task 0 | n_gen = many, tg = fast",
        "",
    ]
    store = read("\n".join(lines))
    (finding,) = [one for one in find(store) if one.rule == "log-unread"]
    assert "1 of them" in finding.evidence and "n_gen = many" in finding.evidence
    with pytest.raises(TraceFileError, match="1 lines cannot be read, the first is line 1: "):
        read("0.02.000.000 I slot print_timing: id  0 | task 0 | n_gen = many, tg = fast\n")


# -- vLLM and SGLang ---------------------------------------------------------------------------

SPEC = (
    "SpecDecoding metrics: Mean acceptance length: {mean}, Accepted throughput: 28.20 tokens/s, "
    "Drafted throughput: 45.30 tokens/s, Accepted: {a} tokens, Drafted: {d} tokens, "
    "Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {rate}%"
)


def vllm(a: int, d: int, rates: list[float], head: str, steps: int) -> str:
    rate = f"{100 * a / d:.1f}" if d else "nan"
    mean = f"{1 + a / steps:.2f}"
    shown = ", ".join(f"{one:.3f}" for one in rates)
    return head + SPEC.format(mean=mean, a=a, d=d, rates=shown, rate=rate) + "\n"


OLD_WORDS = """\
INFO 04-01 10:00:00 [metrics.py:50] SpecDecoding metrics: Draft acceptance rate: 50.0%, \
Accepted: 33 tokens, Drafted: 66 tokens
INFO 03-30 10:00:00 [metrics.py:50] Speculative metrics: Draft acceptance rate: 1.000, \
Number of accepted tokens: 66, Number of draft tokens: 66,\x20
"""
VLLM_HEAD = "(APIServer pid=4411) INFO 05-08 16:26:{:02} [metrics.py:101] "


def test_intervals_of_vllm_have_their_right_values() -> None:
    store = read((DATA / "logs" / "vllm.log").read_bytes())
    names = ("draft_n", "draft_n_accepted", "num_spec_steps", "num_accepted_tokens_per_pos")
    assert told(store, *names) == [(453, 282, 151, [124, 92, 66]), (453, 299, 151, [124, 102, 73])]
    assert sums(store) == (None, 906, 581, 302)
    first = store.runs[0]["requests"][0]
    assert first["place"] == "engine 000, 05-08 16:26:29"
    assert first["told"]["predicted_per_second"] == 124.5
    assert first["record"]["accepted_per_second"] == 28.2
    assert not rules(store)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # only the first position
            vllm(30, 300, [0.3, 0, 0], VLLM_HEAD.format(1), 100),
            [(300, 30, 100, [30, 0, 0])],
        ),
        (vllm(0, 300, [0, 0, 0], VLLM_HEAD.format(1), 100), [(300, 0, 100, [0, 0, 0])]),
        (  # two engines, each with its own line before
            "".join(
                f"(APIServer pid=1) INFO 05-08 16:26:29 [loggers.py:271] Engine 00{i}: Avg prompt "
                f"throughput: 5.0tokens/s, Avg generation throughput: 124.5tokens/s\n"
                + vllm(60 + i, 200, [(60 + i) / 100, 0], VLLM_HEAD.format(29), 100)
                for i in range(2)
            ),
            [(200, 60, 100, [60, 0]), (200, 61, 100, [61, 0])],
        ),
        (  # the words of April 2025
            OLD_WORDS,
            [(66, 33, None, None), (66, 66, None, None)],
        ),
        (  # the first generation counts on
            "".join(
                f"INFO 11-05 08:00:{i:02} metrics.py:400] Speculative metrics: Draft acceptance "
                f"rate: 0.600, System efficiency: 0.500, Number of speculative tokens: 4, Number "
                f"of accepted tokens: {60 * i}, Number of draft tokens: {100 * i}, Number of "
                f"emitted tokens: {80 * i}.\n"
                for i in (1, 2, 3)
            ),
            [(100, 60, 25, None)] * 3,
        ),
        (  # drafts of any length: neither the positions nor the mean tell how many
            vllm(282, 455, [0.821, 0.609, 0.437], "vllm-1  | " + VLLM_HEAD.format(3), 151),
            [(455, 282, 151, [124, 92, 66])],
        ),
    ],
)
def test_other_lines_of_vllm(text: str, expected: list[Any]) -> None:
    access = '(APIServer pid=4411) INFO:     127.0.0.1:49754 - "POST /v1/chat/completions" 200 OK\n'
    store = read(access + text.replace("\n", "\n" + access))
    names = ("draft_n", "draft_n_accepted", "num_spec_steps", "num_accepted_tokens_per_pos")
    assert told(store, *names) == expected
    assert "log-unread" not in rules(store) and "counters-contradict" not in rules(store)
    assert recognise(text.encode()) == "log"


def test_an_impossible_line_of_vllm_is_not_read() -> None:
    text = vllm(282, 453, [0.821, 0.609, 0.437], VLLM_HEAD.format(1), 151)
    store = read(text + text.replace("Accepted: 282", "Accepted: 9999999999999"))
    assert rules(store) == ["log-unread"] and sums(store)[1:3] == (453, 282)
    store = read(text.replace("0.437", "0.937"))
    assert rules(store) == ["counters-contradict"]


def test_averages_of_sglang_have_no_counts() -> None:
    store = read((DATA / "logs" / "sglang.log").read_bytes())
    names = ("mean_acceptance_length", "draft_acceptance_rate", "predicted_per_second", "draft_n")
    assert told(store, *names) == [(2.81, 0.6, 118.32, None), (2.65, 0.55, 112.07, None)]
    assert sums(store) == (None, None, None, None)
    more = (
        "[2026-06-02 10:11:12 DP1 TP0] Decode batch. #running-req: 4, #token: 1822, token usage: "
        "0.01, accept len: 1.00, gen throughput (token/s): 18.32, #queue-req: 0\n"
        "[2026-06-02 10:11:13] Decode batch, #running-req: 1, gen throughput (token/s): 8.3\n"
        "[2026-06-02 10:11:14] INFO:     127.0.0.1:40052 - \"POST /generate HTTP/1.1\" 200 OK\n"
    )  # fmt: skip
    store = read(more)
    assert told(store, *names) == [(1.0, None, 18.32, None)]
    assert store.runs[0]["requests"][0]["place"] == "rank 1, 2026-06-02 10:11:12"
    assert summary(store, 0)["mean_acceptance_length"] == 1.0, "the only one is the whole"


def test_requests_that_sglang_finished_have_counts() -> None:
    meta = json.loads((DATA / "logs" / "sglang-spec.json").read_text())["meta_info"]
    text = (
        f"[2025-10-02 23:42:16] Finish: obj=GenerateReqInput(rid='5'), out={{'meta_info': {meta}}}"
    )
    store = read(text + "\n")
    assert told(store, "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps") == [
        (64, 69, 41, 23)
    ]
    assert recognise(text.encode()) == "log"
    old = "Finish: obj=x(), out={'meta_info': {'completion_tokens': 148, 'spec_verify_ct': 61, "
    store = read(old + "'spec_accept_rate': 0.475, 'spec_accept_length': 2.42623}}\n")
    names = "num_spec_steps", "mean_acceptance_length", "draft_acceptance_rate"
    assert told(store, *names) == [(61, 2.42623, 0.475)]


def test_gauges_of_sglang_are_averages() -> None:
    text = (
        "# TYPE sglang:spec_accept_length gauge\n"
        'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.78\n'
        "# TYPE sglang:spec_accept_rate gauge\n"
        'sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.59\n'
    )
    assert recognise(text.encode()) == "prometheus"
    store = TraceStore()
    records.fill(store, text.encode(), "metrics.txt")
    names = ("mean_acceptance_length", "draft_acceptance_rate", "draft_n")
    assert told(store, *names) == [(2.78, 0.59, None)]


# -- long logs -----------------------------------------------------------------------------------


def test_more_requests_than_a_trace_holds_are_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.observe.rounds.server_log.MOST_REQUESTS", 16)
    head = "1.02.{:03}.004 I slot print_timing: id  0 | task {} | "
    line = "{head}draft acceptance = 0.5 (   30 accepted /    60 generated), mean len =  2.50\n"
    store = read("".join(with_times(line, head.format(i, i)) for i in range(100)))
    assert sums(store) == (10100, 6000, 3000, 2000)
    assert len(store.runs[0]["requests"]) <= 16
    assert store.runs[0]["requests"][0]["place"].startswith("the first ")


def test_more_intervals_than_a_run_keeps_are_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.observe.files.intervals.MOST_INTERVALS", 16)
    heads = (VLLM_HEAD.format(i % 60) + f"Engine 00{i % 2}: " for i in range(100))
    store = read("".join(vllm(30, 300, [0.3, 0, 0], head, 100) for head in heads))
    assert sums(store) == (None, 30000, 3000, 10000)
    assert len(store.runs[0]["requests"]) <= 17
    batch = "[2026-06-02 10:11:12] Decode batch, accept len: {}, accept rate: 0.5, #queue-req: 0\n"
    store = read("".join(batch.format(2 + i % 2) for i in range(64)))
    assert {one for (one,) in told(store, "mean_acceptance_length")} == {2.5}
    assert len(store.runs[0]["requests"]) < 16


# -- files -------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not here")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("03-default-server-log/pasted-part.log", [(304, 306, 152, 153)]),
        ("03-default-server-log/ik-build.log", [(304, 172, 152, None)]),
        ("04-log-lines-with-prefix/compose.log", [(25, 36, 12, 12)]),
        ("04-log-lines-with-prefix/journal.log", [(25, 36, 12, 12)]),
        ("04-log-lines-with-prefix/router.log", [(25, 36, 12, 12)]),
        ("04-log-lines-with-prefix/verbose-router.log", [(20, 30, 9, 10)]),
    ],
)
def test_cases_have_their_right_values(name: str, expected: list[Any]) -> None:
    store = TraceStore()
    import_file(store, CASES / name)
    assert [sums(store, run) for run in store.runs] == expected
    assert not rules(store)


def test_a_log_that_says_what_it_is_late_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "late.log"
    access = 'INFO:     127.0.0.1:49754 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    text = access * 8000 + vllm(0, 300, [0, 0, 0], VLLM_HEAD.format(1), 100)
    path.write_text(text)
    store = TraceStore()
    import_file(store, path)
    assert sums(store)[1:3] == (300, 0)


def test_what_is_no_log_says_what_was_expected(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear all,\nacceptance is low.\n")
    with pytest.raises(TraceFileError, match="not a log with rounds or totals"):
        import_file(TraceStore(), path)


def _collected(text: str, kind: str) -> str:
    lines = text.splitlines()
    if kind == "a list of lines":
        return json.dumps(lines)
    if kind == "Google":
        return json.dumps([{"textPayload": one, "severity": "INFO"} for one in lines], indent=2)
    if kind == "CloudWatch":
        return json.dumps({"events": [{"timestamp": 17552592, "message": one} for one in lines]})
    if kind == "Loki":
        values = [["1755259200000000000", one] for one in lines]
        return json.dumps({"data": {"result": [{"stream": {"pod": "a"}, "values": values}]}})
    if kind == "OpenTelemetry":
        return "".join(json.dumps({"body": one}) + "\n" for one in lines)
    if kind == "a page":
        return text.replace(" ", "\xa0")
    return "".join(f"server.log:{i}:{one}\n" for i, one in enumerate(lines, 1))


@pytest.mark.parametrize("name", ["default.log", "vllm"])
@pytest.mark.parametrize(
    "kind",
    ["a list of lines", "Google", "CloudWatch", "Loki", "OpenTelemetry", "a page", "grep -n"],
)
def test_what_collectors_and_pages_give_back_is_the_same_log(
    tmp_path: Path, kind: str, name: str
) -> None:
    text = (DATA / "logs" / name).read_text() if name != "vllm" else "".join(
        vllm(i, 300, [90 + i, 20, 5], VLLM_HEAD.format(1), 100) for i in range(3)
    )  # fmt: skip
    expected, path = read(text), tmp_path / "collected"
    path.write_text(_collected(text, kind))
    store = TraceStore()
    import_file(store, path)
    assert len(store.runs) == 1 and sums(store) == sums(expected)
    assert len(store.runs[0]["stops"]) == len(expected.runs[0]["stops"])
    assert rules(store) == rules(expected)


def test_cycles_of_dflash_give_what_drafts_gave(tmp_path: Path) -> None:
    line = (
        "2026-05-16 09:12:0{},411 - omlx.engine.dflash - INFO - [-] - DFlash generation complete: "
    )
    text = line.format(1) + "142 tokens, 3.1 tok/s, acceptance=49.3%, cycles=72, ctx=62800\n"
    text += line.format(2) + "142 tokens, 3.1 tok/s, acceptance=81.0%, cycles=72\n"
    path, store = tmp_path / "omlx.log", TraceStore()
    path.write_text(text)
    import_file(store, path)
    told = [one["told"] for one in store.runs[0]["requests"]]
    assert [one["num_spec_steps"] for one in told] == [72, 72]
    assert [one.get("num_accepted_draft_tokens") for one in told] == [70, None]
    assert not any(one.get("draft_acceptance_rate") for one in told)


def test_a_total_in_a_table_of_prompts_is_no_prompt(tmp_path: Path) -> None:
    rows = "  a  pred= 9 draft= 8 acc= 3 rate=0.375 tok/s=1.5\n  b  pred= 9 draft= 4 acc= 2 "
    rows += "rate=0.500 tok/s=1.5\n  AGG  accept=0.417 draft={} acc=5 pred=18 wall=5.13s\n"
    path, store = tmp_path / "bench.txt", TraceStore()
    path.write_text(rows.format(12) + rows.format(14))
    runs = import_file(store, path)
    assert [[one["place"] for one in store.runs[run]["requests"]] for run in runs] == [
        ["a", "b"]
    ] * 2
    assert [one.rule for one in find(store)] == ["log-lines-missing"]
