"""Streams of a llama-server become rows of the trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.findings.check import find
from engine.observe.observed_run import ObservedRequest, ObservedRun, ServerFacts
from engine.trace.store import TraceStore


def event(
    n: int, ms: float, text: str, token: int, drafted: int = 0, accepted: int = 0, **more: Any
) -> bytes:
    """A chunk of /completion. n, ms, drafted, accepted: the server's counters behind it."""
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
    assert "predicted_n fell by 1" in finding.message
