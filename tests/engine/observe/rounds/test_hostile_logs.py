"""Logs that were altered or made to harm: what cannot be is counted and found, and nothing runs
for long."""

from __future__ import annotations

import multiprocessing
import resource

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files.log_run import fill_log
from engine.observe.rounds.log_lines import LogLines
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.log_text import unwrapped
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.captures import load

LIGHT = "light-log"


def light_lines() -> list[str]:
    return load(LIGHT).log.split("\n")


@pytest.mark.parametrize(
    "number", ["1025", "2147483648", "1000000000", "9" * 19, "1" + "0" * 400, "9" * 5000]
)
@pytest.mark.parametrize("place", [0, 1], ids=["accepted", "drafted"])
def test_a_number_out_of_range_is_found_with_its_line(
    number: str, place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = light_lines()
    at = next(i for i, line in enumerate(lines) if " draft tokens" in line and i > 100)
    head, _, tail = lines[at].partition("accepted ")
    counts, _, rest = tail.partition(" draft tokens")
    pair = counts.split("/")
    pair[place] = f" {number}"
    lines[at] = f"{head}accepted {'/'.join(pair)} draft tokens{rest}"
    store = TraceStore()
    fill_log(store, "\n".join(lines), "server.log")
    (finding,) = [one for one in find(store) if one.rule == "log-unread"]
    assert f"the first is line {at + 1}:" in finding.evidence
    folder = tmp_path_factory.mktemp("trace")
    export_csv(store, folder / "out")
    assert len(open_trace(folder / "out").rounds) == len(store.rounds)


def test_a_log_of_which_nothing_remains_says_why() -> None:
    log = "\n".join(light_lines()).replace(" draft tokens", "0000000000 draft tokens")
    with pytest.raises(
        TraceFileError, match=r"has neither .* cannot be read, the first is line \d+: "
    ):
        fill_log(TraceStore(), log, "server.log")


def test_a_good_log_has_no_unread_entries() -> None:
    for name in (LIGHT, "mtp", "utf8"):
        reader = LogReader()
        reader.feed(load(name).log)
        reader.end()
        assert not reader.unread


def test_times_years_apart_are_not_those_of_one_log() -> None:
    lines = light_lines()
    stamps = [i for i, line in enumerate(lines) if line[:1].isdigit()]
    lines[stamps[-9]] = "999999999" + lines[stamps[-9]][1:].lstrip("0123456789")
    reader = LogReader()
    reader.feed("\n".join(lines))
    assert "years away" in reader.server.first_unread


def test_more_requests_than_a_trace_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.observe.rounds.server_log.MOST_REQUESTS", 10)
    entry = "0.00.000.001 I slot update_slots: id  0 | task {} | accepted  1/ 3 draft tokens\n"
    with pytest.raises(TraceFileError, match="more than 10 requests"):
        fill_log(TraceStore(), "".join(map(entry.format, range(12))), "server.log")


def test_of_a_long_entry_only_the_beginning_is_kept() -> None:
    reader = LogReader()
    reader.feed("0.00.000.001 I ")
    for _ in range(64):
        reader.feed("x" * (1 << 18))
    assert sum(map(len, reader._lines._rest)) < 1 << 19


def test_entries_are_the_same_wherever_a_log_is_cut() -> None:
    text = "\n".join(load("mtp").log.split("\n")[-400:])

    def read(step: int) -> list[object]:
        lines = LogLines()
        parts = [lines.lines(text[at : at + step].encode()) for at in range(0, len(text), step)]
        whole = b"".join([*parts, lines.last_lines()]).decode().split("\n")[:-1]
        return [(line[1], line[3]) for one in whole for line in lines.placed(one)]

    whole = read(len(text))
    assert len(whole) > 100
    assert read(1) == read(23) == read(24) == whole


PUMPED = {
    "slot": ("", "slot ", ""),
    "slot id": ("slot x: id ", " ", ""),
    "slot ids": ("", "slot x: id 1", ""),
    "candidate": ("", "- seq_id 0, draft candidate 0, pos 0: 1 (0.5) '", ""),
    "candidate, no end": ("- seq_id 0, draft candidate 0, pos 0: 1 (0.5) '", "' ", "x"),
    "candidate digits": ("- seq_id ", "1", ""),
    "impl": ("called impl ", "called,", ""),
    "drafter": ("", "adding speculative implementation '", ""),
    "decode": ("slot x: id 0 | task 1 | ", "slot decode token, id=1, n_tokens ", ""),
    "created": ("slot x: id 0 | task 1 | ", "created speculative checkpoint ( size = ", ""),
    "restoring": ("slot x: id 0 | task 1 | ", "restoring speculative checkpoint ( size = ", ""),
    "token": ("slot x: id 0 | task 1 | ", "n_gen = 1, n_remaining = 1, next token: 1 '", ""),
    "prompt": ("slot x: id 0 | task 1 | ", "new prompt, ", ""),
    "accepted": ("slot x: id 0 | task 1 | accepted ", " ", "x"),
    "model": ("", "load_model: loading model '", ""),
    "build": ("build", " ", "x"),
    "planes": ("llama_context: n_rs_seq ", " ", ""),
    "digits": ("", "1", ""),
    "stamps": ("", "1.00.000.000", ""),
    "eval": ("slot x: id 0 | task 1 | prompt eval time =", " ", ""),
    "sums": ("slot x: id 0 | task 1 | draft acceptance = ", "1", ""),
}
_LONGEST = 1 << 20
_MOST_CPU_S = 120


def _read_pumped() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S + 5))
    for begin, part, end in PUMPED.values():
        reader = LogReader()
        said = f"0.00.000.001 I {begin}{part * (_LONGEST // len(part))}{end}\n"
        reader.feed(said)
        reader.end()


def test_one_entry_of_a_mebibyte_is_read_in_a_moment() -> None:
    child = multiprocessing.get_context("fork").Process(target=_read_pumped)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_lines_that_are_no_objects_take_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them took 40 s."""
    parsed: list[str] = []

    def parse(line: str) -> object:
        parsed.append(line)
        return unwrapped(line)

    monkeypatch.setattr("engine.observe.rounds.log_lines.unwrapped", parse)
    entry = '{"type":"log","time":5,"msg":"x"}'
    reader = LogReader()
    reader.feed("\n".join([f" {entry} \r", *[" }", "[1]", "{", ""] * 100, entry]) + "\n")
    reader.end()
    assert parsed == [entry, entry]
    assert reader.server.n_unread == 300
    assert reader.server.first_unread.startswith("line 2:")
