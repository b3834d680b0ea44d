"""Logs as people paste them: sums of every build and engine, prefixes, several servers, parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find, record_findings
from engine.errors import TraceFileError
from engine.observe.files import records
from engine.observe.files.importing import import_file, recognise
from engine.observe.files.log_run import _lost_rounds, fill_log
from engine.observe.rounds.log_rounds import LogRequest, LogRound
from engine.trace.store import TraceStore
from tests.support.captures import load
from tests.support.golden_files import DATA

CASES = Path(__file__).parents[5] / "shared" / "cases"


def read(text: str | bytes) -> TraceStore:
    store = TraceStore()
    record_findings(store, fill_log(store, text, "pasted.log"))
    return store


def sums(store: TraceStore, run: int = 0) -> tuple[Any, ...]:
    summary = store.runs[run]["summary"]
    names = ("predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps")
    return tuple(summary.get(name) for name in names)


def told(store: TraceStore, *names: str, run: int = 0) -> list[tuple[Any, ...]]:
    """Figures of each request."""
    return [tuple(one["told"].get(name) for name in names) for one in store.runs[run]["requests"]]


def rules(store: TraceStore) -> list[str]:
    return [finding.rule for finding in find(store)]


# -- sums of llama-server, in the words of its builds ------------------------------------------

COUNTS = ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps")


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
TIMES = (
    "{head}prompt eval time =     120.50 ms /    40 tokens (    3.01 ms per token)\n"
    "{head}       eval time =    2000.00 ms /   101 tokens (   19.80 ms per token)\n"
)


def with_times(rest: str, head: str = "1.02.003.004 I slot print_timing: id  1 | task 7 | ") -> str:
    return TIMES.format(head=head) + rest.format(head=head)


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


# -- tables of mtp-bench -----------------------------------------------------------------------

ROWS = "  {name:<18} pred={p:>4} draft={d:>4} acc={a:>4} rate={r} tok/s={s}\n"


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
    with pytest.raises(TraceFileError, match="neither a log with lines of rounds or sums"):
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


HEAD = "slot   operator(): id  0 | task 0 | "


@pytest.mark.parametrize("end", ["", ", new n_tokens = 30"])
def test_rounds_that_say_0_of_all_drafts_are_not_observed(end: str) -> None:
    lines = [f"{HEAD}accepted  {a}/ 0 draft tokens{end}" for a in (2, 0, 1) * 40]
    text = (DATA / "logs" / "default.log").read_text()
    store = read("\n".join([*lines, text]))
    assert sums(store) == (304, 306, 152, 153)
    assert not len(store.rounds) and not rules(store)


def test_omlx_tells_what_each_index_of_its_drafts_had() -> None:
    line = (
        "2026-08-16 12:35:26,812 - mlx_lm_mtp - INFO - MTP[{0}] finish=length tokens=128 cycles=47 "
        "tok/cycle=2.72 accept={1}/94 (87.2%) depth[d1=43/47,d2=39/47] d0=0 emits[init=1]\n"
    )
    text = "".join(line.format(i, 82) for i in range(200)) + line.format("x", 81)
    store = TraceStore()
    (run,) = fill_log(store, text, "omlx.log")
    requests = store.runs[run].requests or []
    assert len(requests) == 201 and requests[200].told == {}  # which contradicts itself
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert {tuple(map(one.told.get, names)) for one in requests[:200]} == {(128, 94, 82, 47)}
    assert requests[0].told["num_accepted_tokens_per_pos"] == [43, 39]


def test_the_console_of_koboldcpp() -> None:
    """Drafts with their tokens one by one, then the request and what became of them."""
    end = "[21:38:44] CtxLimit:712/32768, Amt:{}/1536, Init:0.01s, Process:1.20s ({}426.67T/s), "
    end += "Generate:9.84s ({}20.33T/s), Total:11.05s{}"
    debug = "2.3ms/T = ", "49.2ms/T = ", " (1.81T/s)"
    draft = "Drafted 4 Tokens: [' of (315)', ' the (279)', ' a (264)', ' an (458)', ]"
    judged = [f"(Draft {i}/4): Predicted=9 (a), Actual=9 (a) [PASS]" for i in range(1, 5)]
    lines = [draft, *judged, draft, judged[0], judged[1].replace("PASS", "FAIL"), draft, judged[0]]
    text = "\n".join([
        "Welcome to KoboldCpp - Version 1.111.2", "Processing Prompt [BLAS] (512 / 512 tokens)",
        *lines, "", end.format(7, *debug), "(Draft Results - Success:6, Failure:1)Output: hi",
        end.format(200, "", "", ""), draft, end.format(5, *debug),
        "(Draft Results - Success:90, Failure:9)", "CtxLimit: 3768/4096, Process:0.44s (2T/s)", "",
    ])  # fmt: skip
    store = read(text)
    assert store.runs[0]["source"]["engine"] == "koboldcpp"
    names = ("predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps", "predicted_ms")
    names += ("num_accepted_draft_tokens",)
    assert told(store, *names) == [
        (7, 12, 6, 3, 9840, 6), (200, None, None, None, 9840, None),
        (5, None, None, None, 9840, 90),  # most of its drafts are missing
    ]  # fmt: skip
    assert rules(store) == ["log-unread"] and recognise(text.encode()) == "log"


def test_sglang_may_number_its_batches() -> None:
    line = (
        "[2026-09-12 10:00:0{0} DP{0} TP0] Decode batch [{1}], #running-req: 3, accept len: 2.50, "
    )
    store = read("".join(f"{line.format(i, 10 * i)}accept rate: 0.50\n" for i in (0, 1)))
    assert told(store, "mean_acceptance_length", "draft_acceptance_rate") == [(2.5, 0.5)] * 2


def test_the_console_of_koboldcpp_in_another_order() -> None:
    """What became of the drafts comes before the line of their request, and fits it."""
    draft, end = "Drafted 8 Tokens: [ 1 2 ]", "CtxLimit:98/8192, Amt:{}/200, Process:0.25s (3T/s), "
    end += "Generate:0.52s (34T/s), Total:0.77s"
    results = "(Draft Results - Success:{}, Failure:{})"
    text = "\n".join([
        *[draft] * 3, results.format(15, 3), end.format(18), end.format(40), *[draft] * 2,
        results.format(9, 2), end.format(11), draft, results.format(5, 1), end.format(90), "",
    ])  # fmt: skip
    store = read(text)
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert told(store, *names) == [
        (18, 24, 15, 3), (40, None, None, None), (11, 16, 9, 2), (90, None, None, None),
    ]  # fmt: skip
    assert rules(store) == ["log-unread"]  # 5 accepted tokens and one more are no 90


def test_intervals_of_atom_and_requests_of_omlx() -> None:
    line = "{}:[atom 14:45:5{}] [MTP Stats{}] Average toks/fwd: 1.90, Accepted/Total Draft tokens: "
    line += "{}/{}, Acceptance rate: 45.00%, Accepted tokens distribution: {{0: '40.00%', "
    line += "1: '30.00%', 2: '30.00%'}}\n"
    total = line.format(8, 0, " " * 9, 9000, 20000)
    store = read(line.format(7, 0, " Interval", 900, 2000) + total)
    assert told(store, "draft_n", "draft_n_accepted", "num_spec_steps") == [(2000, 900, 1000)]
    (one,) = store.runs[0]["requests"]
    assert one["told"]["num_accepted_tokens_per_pos"] == [600, 300] and one["place"] == "14:45:50"
    head = "2026-08-16 21:10:01,512 - omlx.scheduler - INFO - [-] - vlm_mtp stats: request=a"
    rest = " finish=stop rounds=40 accepted=52/80 (65.0%) tokens_per_round=2.30{}\n"
    store = read(head + rest.format(" emitted=93 block_size=3") + head + rest.format(""))
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert told(store, *names) == [(93, 80, 52, 40), (None, 80, 52, 40)]


def test_shares_by_position_tell_the_steps_that_a_mean_length_leaves_open() -> None:
    """152 accepted in 153 or in 154 drafts make 1.99; only 153 have these shares."""
    sums = "slot print_timing: id  0 | task 1 | draft acceptance = 0.49672 (  152 accepted /   306 "
    sums += "generated), mean acceptance length =  1.99, acceptance rate per position = ({})\n"
    store = read(sums.format("0.601, 0.392"))
    assert told(store, "num_spec_steps", "draft_n") == [(153, 306)]
    assert told(read(sums.format("0.6, 0.4")), "num_spec_steps") == [(None,)]


def test_the_lines_of_lmdeploy_and_tabbyapi() -> None:
    head = (
        "[2026-11-02 10:00:0{0} DP{0}] Avg thr (in/out): 100.0 / 250.0 tokens/s, KV cache: 10.0%, "
    )
    said = "SpecDecoding metrics: Draft acceptance rate: 61.67%, Mean acceptance length: 2.85, "
    said += "Accepted: 555 tokens, Drafted: 900 tokens, Per-position acceptance rate: "
    store = read("".join(head.format(i) + said + "0.800, 0.600, 0.450\n" for i in (0, 1)))
    assert store.runs[0]["source"]["engine"] == "lmdeploy"
    assert told(store, "num_spec_steps", "draft_n_accepted", "draft_n") == [(300, 555, 900)] * 2
    assert [one["place"][:8] for one in store.runs[0]["requests"]] == ["engine 0", "engine 1"]
    line = "INFO: Metrics (ID: {}): 120 tokens generated in 2.2 seconds (Queue: 0.0 s, Process: 64 "
    line += "cached tokens and 36 new tokens at 500.0 T/s, Generate: 60.0 T/s, Context: 100 tokens"
    drafts = ", Draft: 80 / 120 tokens accepted (66.67%)"
    store = read(f"{line.format('8c1d')}{drafts}) \n{line.format('8c1e')}) \n")
    assert told(store, "cache_n", *COUNTS) == [
        (64, 36, 120, 120, 80, None),
        (64, 36, 120, *[None] * 3),
    ]
    assert store.runs[0]["source"]["engine"] == "tabbyapi" and not rules(store)


def test_letters_and_rows_keep_their_names() -> None:
    """A letter among the digits of a pod's name is kept; a prompt's name has no prefix."""
    lines = (DATA / "logs" / "default.log").read_text().splitlines()
    store = read("".join(f"[pod/llama-6d5f-x2/server] {line}\n" for line in lines))
    assert store.runs[0]["server"]["address"] == "pod/llama-6d5f-x2/server"
    row = "nov 02 box bench[9]:   code_python        pred= 192 draft= 153 acc= 140 rate=0.915"
    store = read(f"{row}\n")
    assert [one["place"] for one in store.runs[0]["requests"]] == ["code_python"]


def test_a_mean_length_that_has_several_numbers_of_steps_is_told() -> None:
    head = "0.02.100.120 I slot print_timing: id  0 | task 0 | "
    counts = "draft acceptance = 0.43103 (  400 accepted /   928 generated), "
    store = read(f"{head}{counts}mean acceptance length =  2.00\n")
    assert told(store, "num_spec_steps", "mean_acceptance_length") == [(None, 2.0)]


@pytest.mark.parametrize("damaged", ["foo pred=; acc=;", "foo xpred= 3 draft= 4 acc= 2 rate=0.5"])
def test_a_damaged_row_of_a_table_is_told(damaged: str) -> None:
    rows = [ROWS.format(name=name, p=192, d=150, a=138, r="0.920", s=7.0) for name in ("a", "b")]
    store = read(f"{''.join(rows)}{damaged}\n")
    assert rules(store) == ["log-unread"]
    assert told(store, "predicted_n") == [(192,), (192,)]


OMLX = (
    "MTP[1] finish=length tokens=131 cycles=60 tok/cycle=2.26 accept=71/103 (68.9%) "
    "depth[d1=45/58,d2=19/35,d3=7/10] d0=2 emits[init=2]\n"
)
FORK = (
    "INFO MTP[a] finish=stop cycles=60 accepted=75/120 (62.5%) cycles_by_depth[d2=60]\n"
    "INFO MTP[a] accept_by_depth[d1=46/60,d2=29/60,d3=0/0] forwards[mtp=122]\n"
)


@pytest.mark.parametrize(
    ("text", "counts", "conditional"),
    [(OMLX, (58, 103, 71), [45 / 58, 19 / 35, 7 / 10]), (FORK, (60, 120, 75), [46 / 60, 29 / 46])],
)
def test_depths_of_mlx_servers(
    text: str, counts: tuple[int, ...], conditional: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "server.log"
    path.write_text(text)
    store = TraceStore()
    import_file(store, path)
    (one,) = store.runs[0]["requests"]
    names = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
    assert tuple(map(one["told"].get, names)) == counts
    assert one["told"]["acceptance_per_position"]["conditional"] == pytest.approx(conditional)
    assert not find(store)


def _batches(means: list[float]) -> str:
    line = (
        "[2026-10-01 12:{}:{:02d} TP0] Decode batch, #running-req: 1, accept len: {:.2f}, "
        "accept rate: {:.2f}, gen throughput (token/s): {:.2f}, #queue-req: 0\n"
    )
    rows = [(10 + i // 60, i % 60, one) for i, one in enumerate(means)]
    return "".join(line.format(m, s, one, (one - 1) / 3, 50 * one) for m, s, one in rows)


@pytest.mark.parametrize(
    ("means", "rule", "words"),
    [
        ([1.01, 1.02] * 20, "acceptance-zero", "0.02 tokens of each of about 1,950 drafts"),
        ([2.5] * 20 + [1.0] * 20, "acceptance-zero-from", "before it 1.50 tokens of each"),
        ([1.35] * 40, "", ""),
        ([1.01] * 3, "", ""),
    ],
)
def test_averages_at_chance(means: list[float], rule: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(_batches(means))
    store = TraceStore()
    record_findings(store, import_file(store, path))
    found = find(store)
    assert [one.rule for one in found] == ([rule] if rule else [])
    assert all(words in one.message for one in found)


def test_averages_without_times_are_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(re.sub(r"\[.*?\] ", "", _batches([1.01] * 40)))
    store = TraceStore()
    import_file(store, path)
    assert not find(store)


@pytest.mark.parametrize("depths", ["d1=400/500,d2=0/300", "d1=450/500,d2=400/450,d3=8/300"])
def test_depths_that_were_judged_are_those_that_count(depths: str, tmp_path: Path) -> None:
    pairs = [tuple(map(int, one.split("=")[1].split("/"))) for one in depths.split(",")]
    accepted, drafted = map(sum, zip(*pairs, strict=True))
    path = tmp_path / "server.log"
    line = f"MTP[1] finish=stop tokens=9999 cycles=500 accept={accepted}/{drafted} depth[{depths}]"
    path.write_text(line + "\n")
    store = TraceStore()
    import_file(store, path)
    (found,) = find(store)
    assert f"{pairs[-2][0]} of {pairs[-2][1]}" in found.message
    assert f"{pairs[-1][0]} of {pairs[-1][1]}" in found.message
