"""Logs of llama-servers: their forms, how they grow, and how they join streams."""

from __future__ import annotations

import json

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files.importing import is_log
from engine.observe.files.log_run import fill_log
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.trace.records import EMITTED_KINDS
from engine.trace.store import TraceStore
from tests.support.captures import ids_of, imported, load, rounds_of


def read(text: str, step: int) -> LogReader:
    """A log that came in pieces of this many characters."""
    reader = LogReader()
    for at in range(0, len(text), step):
        reader.feed(text[at : at + step])
    reader.end()
    return reader


def figures(reader: LogReader) -> list[object]:
    return [
        [(r.pos, r.drafted, r.accepted, r.restored, r.tokens, r.drafter) for r in request.rounds]
        for request in reader.requests
    ]


def test_a_log_may_be_cut_anywhere() -> None:
    text = load("utf8").log
    whole = read(text, len(text))
    assert figures(read(text, 997)) == figures(whole)
    assert sum(len(request.rounds) for request in whole.requests) == 37
    server = whole.server
    assert (server.n_rs_seq, server.drafters) == (3, ["draft-mtp"])
    assert server.model == "demo-target.gguf"


def test_a_round_whose_tokens_end_the_answer_is_known_from_what_joins_it() -> None:
    """Newer servers count what was accepted after the tokens, and not where these end the task."""
    says = "0.00.0{}.000.000 D slot fn: id 0 | task 2 | {}\n"
    lines = ("generate_draft: id=9, #tokens=8, #draft=2, pos_next=8",)
    lines += ("add accepted tokens: sampled=9, ids.size={}, n_draft=2",)
    lines += ("n_gen = {}, n_remaining = 9, next token:     5 'a'",) * 2
    ends = (
        "draft acceptance = 0.5 (    2 accepted /     4 generated)",
        "stop processing: n_tokens",
    )
    first = [lines[2].format(1), lines[0], lines[1].format(1), lines[2].format(2)]
    first.append("accepted 0/2 draft tokens, new n_tokens = 9")
    last = [lines[0], lines[1].format(3), lines[2].format(3), lines[3].format(4), *ends]
    text = "".join(says.format(i + 10, line) for i, line in enumerate([*first, *last]))
    (request,) = read(text, len(text)).requests
    found = [(one.drafted, one.accepted, one.is_complete) for one in request.rounds]
    assert found == [(2, 0, True), (2, 2, True)]


def test_what_a_server_says_of_its_start_is_known() -> None:
    lines = (
        "print_info: file size   = 0.79 MiB (4.62 BPW) ",
        "print_info: freq_base_train       = 10000.0",
        "llama_context: freq_base             = 800.0",
        "llama_kv_cache: size = 0.56 MiB (2048 cells, 2 layers), K (q4_0): 1 MiB, V (f16): 1 MiB",
        "spec common_specu: - n_max=3, n_min=0, p_min=0.60",
        "srv    load_model: failed to initialize speculative decoding context: another vocabulary",
    )
    text = "".join(f"0.00.0{i}.000.000 I {line}\n" for i, line in enumerate(lines * 2))
    assert read(text, len(text)).server.launch == {
        "file_size": ["0.79 MiB"],
        "freq_base_train": ["10000.0"],
        "freq_base": ["800.0"],
        "k": ["q4_0"],
        "v": ["f16"],
        "n_max": ["3"],
        "n_min": ["0"],
        "p_min": ["0.60"],
        "refusal": ["another vocabulary"],
    }


def test_both_forms_tell_the_same() -> None:
    text = load("mtp").log
    entries = []
    for part in text.split("\n"):
        stamp, _, rest = part.partition(" ")
        if stamp.count(".") == 3 and rest[1:2] == " " and "parser definition" not in rest:
            entry = {"type": "log", "time": 5, "level": "debug", "msg": rest[2:] + "\n"}
            entries.append(json.dumps(entry))
    jsonl = read("\n".join(entries), 4096)
    whole = read(text, len(text))
    for one, other in zip(jsonl.requests, whole.requests, strict=True):
        mine, theirs = ([(r.drafted, r.accepted) for r in x.rounds] for x in (one, other))
        assert mine == theirs


@pytest.mark.parametrize("name", ["mtp", "light-log", "draft"])
@pytest.mark.thinned(4)
def test_colours_and_prefixes_change_nothing(name: str) -> None:
    text = load(name).log
    plain = read(text, len(text))
    lines = text.split("\n")
    coloured = [
        f"\x1b[34m{stamp}\x1b[0m \x1b[32m{rest[:2]}\x1b[0m{rest[2:]}"
        if stamp.count(".") == 3
        else line
        for line in lines
        for stamp, _, rest in (line.partition(" "),)
    ]
    wrapped = [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "x"}) for line in lines]
    for changed in (
        "\r\n".join(lines),
        "\n".join(coloured),
        "\n".join(f"[53409] {line}" for line in lines),
        "\n".join(f"llama-1  | {line}" for line in lines),
        "\n".join(f"2026-08-15T19:02:{i % 60:02}.{i % 997:03}Z {s}" for i, s in enumerate(lines)),
        "\n".join(wrapped),
    ):
        reader = read(changed, 1 << 16)
        assert figures(reader) == figures(plain)
        assert len(reader.servers) == 1 and not reader.unread
        assert is_log(changed[: 1 << 17]) or changed[0] == "{"


def test_a_log_without_requests_says_how_to_get_rounds() -> None:
    with pytest.raises(TraceFileError, match="LLAMA_TRACE=1"):
        fill_log(TraceStore(), "0.00.001.342 I srv  llama_server: initializing ...\n", "server.log")


def test_a_log_by_itself_has_ids_drafts_and_times() -> None:
    store, capture = TraceStore(), load("draft")
    fill_log(store, capture.log, "draft.log")
    joined = imported(capture, with_log=True)
    names = ("pos0", "num_draft_tokens", "num_emitted", "rollback_path", "drafter", "n_rs_seq")
    assert rounds_of(store, 0, *names)[1:] == rounds_of(joined, 0, *names)[1:]
    for kinds in (EMITTED_KINDS, ("rejected",), ("replayed",)):
        assert ids_of(store, 0, *kinds) == ids_of(joined, 0, *kinds) != []
    times = store.rounds.column("t_ms")
    assert (times[1:] >= times[:-1]).all()
    assert store.runs[0]["attachment"] == "log"
    assert {f.rule for f in find(store)} == {"checkpoint-dominates"}


@pytest.mark.parametrize("lag", [0, 40])
def test_rows_of_a_stream_wait_for_a_log_that_follows(lag: int) -> None:
    capture = load("draft")
    request = capture.requests[0]
    lines = capture.log.split("\n")
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    run.log("")
    observed = run.request(request.path, request.body, 0.0)
    observed.head(200, {"content-type": "text/event-stream"}, 1.0)
    per_piece = len(lines) // len(request.pieces) + 1
    n_waited = 0
    for i, (at_ms, piece) in enumerate(request.pieces):
        observed.data(piece, at_ms)
        told = max(i + 1 - lag, 0) * per_piece
        run.log("\n".join(lines[told - per_piece : told]) + "\n" if told else "")
        n_waited += len(store.rounds) == 0
    observed.done(request.done_ms)
    run.log("\n".join(lines[max(len(request.pieces) - lag, 0) * per_piece :]))
    run.log_ended()
    run.end()
    assert n_waited >= lag
    whole = imported(capture, with_log=True)
    names = ("num_draft_tokens", "num_emitted", "rollback_path", "checkpoint_bytes", "verify_ms")
    assert rounds_of(store, 0, *names) == rounds_of(whole, 0, *names)
    assert ids_of(store, 0, "rejected") == ids_of(whole, 0, "rejected")
    assert not any("log" in finding.rule for finding in find(store))


def test_rows_do_not_wait_forever_for_a_log_that_says_nothing() -> None:
    request = load("draft").requests[0]
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    run.log("0.00.001.342 I srv  llama_server: initializing ...\n")
    observed = run.request(request.path, request.body, 0.0)
    for at_ms, piece in request.pieces:
        observed.data(piece, at_ms)
    observed.done(request.done_ms)
    assert not len(store.rounds)
    other = run.request("/completion", {}, request.done_ms + 3000)
    other.data(b"data: null\n\n", request.done_ms + 3001)
    assert len(store.rounds) == 32
    run.end()
    assert [finding.rule for finding in find(store)].count("log-of-another-run") == 1


OLD = """slot process_toke: id  0 | task 118 | n_decoded = 1, n_remaining = -1, next token: 518 '{'
slot update_slots: id  0 | task 118 | max possible draft: 16
 - draft candidate   0, pos   0:   1723 (   1.000) 'function'
 - draft candidate   1, pos   0:   2900 (   0.000) 'func'
 - draft candidate   0, pos   1:    794 (   1.000) '":'
 - draft candidate   0, pos   2:   5324 (   0.900) ' {"'
slot process_toke: id  0 | task 118 | n_decoded = 2, n_remaining = -1, next token:  1723 'function'
slot process_toke: id  0 | task 118 | n_decoded = 3, n_remaining = -1, next token:   794 '":'
slot process_toke: id  0 | task 118 | n_decoded = 4, n_remaining = -1, next token:   330 ' "'
slot update_slots: id  0 | task 118 | accepted 2/3 draft tokens, new n_past = 2108
slot process_toke: id  0 | task 118 | n_decoded = 5, n_remaining = -1, next token:    92 '}'
slot update_slots: id  0 | task 118 | max possible draft: 16
slot process_toke: id  0 | task 118 | n_decoded = 6, n_remaining = -1, next token:    10 '.'
slot update_slots: id  0 | task 118 | accepted 0/1 draft tokens, new n_past = 2110
"""


@pytest.mark.parametrize("n_blank", [0, 100])
def test_a_build_that_names_rounds_after_their_tokens(n_blank: int) -> None:
    """The tokens before such a line are the round's, those before its draft rounds of their own."""
    reader = LogReader()
    reader.feed(OLD + "que  start_loop: nothing\n" * n_blank)
    reader.end()
    (request,) = reader.requests
    rounds = [
        (one.drafted, one.accepted, one.first_n, [t for t, _ in one.tokens])
        for one in request.rounds
    ]
    assert rounds == [(3, 2, 2, [1723, 794, 330]), (0, 0, 5, [92]), (1, 0, 6, [10])]
    drafts = [[tops[0][0] for tops in one.draft] for one in request.rounds]
    assert drafts == [[1723, 794, 5324], [], []]
    assert not reader.unread


def test_rounds_that_say_that_nothing_was_drafted_are_counted_in_the_error() -> None:
    line = "slot update_slots: id  3 | task 0 | accepted {}/0 draft tokens, new n_tokens = 741"
    with pytest.raises(TraceFileError, match="it has 3 rounds with 0 drafted tokens"):
        fill_log(TraceStore(), "\n".join(map(line.format, (11, 4, 16, 0))), "server.log")
