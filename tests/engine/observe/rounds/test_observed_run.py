"""Streams of a llama-server become rows of the trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from engine.analysis.findings.check import find
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.trace.store import TraceStore


def event(
    n: int, ms: float, text: str, token: int, drafted: int = 0, accepted: int = 0, **more: Any
) -> bytes:
    """A chunk of /completion. n, ms, drafted, accepted: the server's counters after it."""
    timings = {
        "cache_n": 0,
        "prompt_n": 4,
        "prompt_ms": 10.0,
        "predicted_n": n,
        "predicted_ms": ms,
        "draft_n": drafted,
        "draft_n_accepted": accepted,
    }
    said = {"index": 0, "content": text, "tokens": [token], "stop": False, "timings": timings}
    return f"data: {json.dumps(said | more)}\n\n".encode()


ANSWER = (
    event(1, 0.001, "a", 1),
    event(2, 5.0, "b", 2, 3, 1),
    event(3, 5.0, "c", 3, 3, 1),
    event(4, 9.0, "d", 4, 6, 4),
    event(5, 9.0, "e", 5, 6, 4),
    event(6, 9.0, "f", 6, 6, 4),
    event(7, 9.0, "g", 7, 6, 4),
    event(7, 9.0, "", 0, 6, 4, stop=True, stop_type="limit", truncated=False, tokens=[]),
)
"""Rounds: the first token; 3 drafted of which 1 accepted, undone in place; 3 of 3 accepted."""


def observe(pieces: Iterable[bytes]) -> tuple[TraceStore, ObservedRun, ObservedRequest]:
    """A run of one request that got these pieces, 10 ms apart."""
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    request = run.request("/completion", {"prompt": [5, 6, 7, 8], "stream": True}, 0.0)
    request.head(200, {"Content-Type": "text/event-stream"}, 5.0)
    for i, piece in enumerate(pieces):
        request.data(piece, 20.0 + 10 * i)
    return store, run, request


def rows(store: TraceStore, *names: str) -> list[tuple[Any, ...]]:
    """These columns of all rows of rounds."""
    return [tuple(store.rounds.row(i)[name] for name in names) for i in range(len(store.rounds))]


def test_rounds_are_written_as_soon_as_the_next_begins() -> None:
    store, _, request = observe(ANSWER[:4])
    names = ("round", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted")
    assert rows(store, *names) == [(0, None, None, 1), (1, 3, 1, 2)]
    assert request.text == "abcd"


def test_a_whole_stream_gives_its_rounds_tokens_and_stop() -> None:
    store, run, request = observe(ANSWER)
    request.done(100.0)
    run.end()
    assert rows(store, "pos0", "num_draft_tokens", "num_emitted", "rollback_path", "stop_kind") == [
        (0, None, 1, "none", "target"),
        (4, 3, 2, "seq_rm", "replacement"),
        (6, 3, 4, "none", "bonus"),
    ]
    times = np.array(rows(store, "t_ms", "total_ms"))
    assert np.allclose(times, [(19.999, 10.0), (24.999, 4.999), (28.999, 4.0)])
    tokens = store.tokens
    assert tokens.column("token_id").tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]
    assert tokens.column("pos").tolist() == list(range(11))
    assert tokens.texts("kind")[4:] == [
        "target",
        "accepted",
        "replacement",
        *["accepted"] * 3,
        "bonus",
    ]
    assert store.pieces == {i: bytes([96 + i]) for i in range(1, 8)}
    assert store.runs[0]["stops"] == ["limit"]
    assert store.runs[0]["requests"][0]["complete"] is True
    assert not find(store)


def test_a_cut_stream_keeps_its_rounds_and_is_found() -> None:
    store, run, request = observe(ANSWER[:6])
    request.broke("The connection to the server was lost.", 90.0)
    run.end()
    assert rows(store, "num_draft_tokens", "num_emitted", "rollback_path", "stop_kind")[1:] == [
        (3, 2, "seq_rm", "replacement"),
        (3, 3, "none", "end"),
    ]
    (finding,) = find(store)
    assert (finding.rule, finding.seq_id) == ("stream-cut", 0)
    assert store.runs[0]["stops"] == ["lost"]


def test_a_counter_that_falls_ends_the_rows_with_a_finding() -> None:
    store, run, request = observe((*ANSWER[:4], event(3, 9.0, "x", 9, 6, 4), *ANSWER[4:]))
    request.done(100.0)
    run.end()
    assert len(store.rounds) == 2
    (finding,) = find(store)
    assert finding.rule == "counters-contradict"
    assert "predicted_n decreased by 1" in finding.message


def test_answers_of_one_stream_are_sequences_of_their_own() -> None:
    both = [
        (event(n, ms, text, token, d, a, index=i))
        for n, ms, text, token, d, a in (
            (1, 0.001, "a", 1, 0, 0),
            (2, 5.0, "b", 2, 3, 0),
            (3, 9.0, "c", 3, 6, 0),
        )
        for i in (1, 0)
    ]
    store, run, request = observe(both)
    assert request.seq_ids == (0, 1)
    request.broke("The connection to the server was lost.", 90.0)
    run.end()
    for seq_id in (0, 1):
        mine = [row for row in rows(store, "seq_id", "num_emitted") if row[0] == seq_id]
        assert [n for _, n in mine] == [1, 1, 1]
    assert [row[0] for row in rows(store, "round")] == list(range(6))
    assert store.runs[0]["stops"] == ["lost", "lost"]


def test_requests_side_by_side_are_numbered_by_the_ends_of_their_rounds() -> None:
    store = TraceStore()
    run = ObservedRun(store, "proxy", ServerFacts("http://127.0.0.1:1"))
    first, second = (run.request("/completion", {}, float(i)) for i in range(2))
    first.data(event(1, 0.001, "a", 1), 20.0)  # its clock begins at 10
    second.data(event(1, 0.001, "a", 1), 22.0)  # and this one's at 12
    for n in range(2, 6):
        first.data(event(n, 10.0 * n, "b", 2, 3 * n), 30.0 * n)
    assert len(store.rounds) < 4, "rounds of the second may have ended before those"
    for n in range(2, 6):
        second.data(event(n, 10.0 * n, "b", 2, 3 * n), 200.0 + n)
    first.left(300.0)
    second.left(301.0)
    run.end()
    assert [row[0] for row in rows(store, "seq_id")] == [0, 1] * 5
    times = store.rounds.column("t_ms")
    assert (np.diff(times) >= 0).all()


def test_a_request_without_events_has_its_sums_and_a_refusal_its_reason() -> None:
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    reply = json.loads(ANSWER[-1].decode().removeprefix("data: ")) | {"content": "abcdefg"}
    whole = run.request("/completion", {}, 0.0)
    whole.head(200, {"Content-Type": "application/json; charset=utf-8"}, 1.0)
    whole.data(json.dumps(reply).encode(), 2.0)
    whole.done(3.0)
    refused = run.request("/completion", {}, 4.0)
    refused.head(400, {"Content-Type": "application/json"}, 5.0)
    refused.data(b'{"error":{"code":400,"message":"request (1201 tokens) exceeds"}}', 6.0)
    refused.done(7.0)
    run.end()
    assert whole.text == "abcdefg"
    assert not len(store.rounds)
    figures = store.runs[0]["summary"]
    assert (figures["predicted_n"], figures["draft_n"], figures["draft_n_accepted"]) == (7, 6, 4)
    assert figures["draft_acceptance_rate"] == 4 / 6
    assert "1201 tokens" in store.runs[0]["requests"][1]["error"]


def test_halves_of_characters_and_line_ends_in_tokens_do_no_harm() -> None:
    store, run, request = observe((event(1, 0.001, "\ud83d", 1), event(2, 5.0, "\r\n", 2, 3, 0)))
    request.left(50.0)
    run.end()
    assert request.text == "�\r\n"
    assert len(store.tokens) == 6


def test_drafter_and_planes_that_are_learned_late_are_filled_in() -> None:
    settings = {"speculative.types": "none,draft-mtp"}
    last = event(
        7, 9.0, "", 0, 6, 4, stop=True, stop_type="limit", generation_settings=settings, tokens=[]
    )
    store, run, request = observe((*ANSWER[:-1], last))
    request.done(100.0)
    run.end()
    assert rows(store, "drafter") == [("",), ("draft-mtp",), ("draft-mtp",)]
    assert store.runs[0]["speculative_types"] == ["none", "draft-mtp"]


def test_lengths_that_no_number_of_planes_explains_show_no_path() -> None:
    """An undoing of 3 tokens in place, then one of 2 with a checkpoint."""
    pieces = [
        event(1, 0.001, "a", 1),
        event(2, 5.0, "b", 2, 3, 0),
        event(3, 9.0, "c", 3, 6, 1),
        event(4, 9.0, "d", 4, 6, 1),
        event(5, 9.0, "e", 5, 6, 1),
        event(6, 12.0, "f", 6, 9, 1),
        event(7, 15.0, "g", 7, 9, 1),
    ]
    store, run, request = observe(pieces)
    request.left(90.0)
    run.end()
    assert rows(store, "rollback_depth", "rollback_path")[1:] == [
        (3, "seq_rm"),
        (2, ""),
        (3, ""),
        (0, "none"),
    ]
    again = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"), known=run)
    more = again.request("/completion", {}, 0.0)
    for piece in pieces:
        more.data(piece, 50.0)
    more.left(90.0)
    again.end()
    assert [row[1] for row in rows(store, "rollback_depth", "rollback_path")[6:]] == [
        "",
        "",
        "",
        "none",
    ]


def test_a_run_has_room_for_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.observe.rounds.answer._MOST_SEQUENCES", 1026)
    store = TraceStore()
    run = ObservedRun(store, "proxy", ServerFacts("http://127.0.0.1:1"))
    requests = [run.request("/completion", {}, float(i)) for i in range(5)]
    for request in requests:
        request.data(ANSWER[0], 20.0)
        request.done(30.0)
    run.end()
    assert len(store.runs[0]["stops"]) == 3
    assert store.runs[0]["requests_left_out"] == 2
