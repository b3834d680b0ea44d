"""Streams that are cut, changed or made to harm: nothing raises, and what was shown stays true."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from httpx_sse._decoders import SSEDecoder
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.analysis.findings.check import find
from engine.observe.rounds import answer, observed_request
from engine.observe.rounds.observed_request import EventReader, ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.observe.rounds.stream import UnreadableError
from engine.observe.rounds.stream_rounds import ContradictionError, ObservedRound, StreamRounds
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.export import export_csv
from engine.trace.records import MISSING
from engine.trace.reopen import open_trace
from engine.trace.store import Table, TraceStore
from tests.support.captures import load
from tests.support.scripted_replies import token_events

NAMES = ("mtp", "utf8", "draft", "chain", "qwen3next", "stops", "ngram-mod")
COUNTERS = (b"predicted_n", b"predicted_ms", b"draft_n", b"draft_n_accepted")


@cache
def stream_of(name: str) -> bytes:
    """The first stream of a capture."""
    request = next(r for r in load(name).requests if "event-stream" in r.content_type)
    return b"".join(piece for _, piece in request.pieces)


def rounds(data: bytes) -> list[ObservedRound]:
    """The rounds of a stream as far as they can be known."""
    reader, told, found = EventReader("text/event-stream"), StreamRounds(PlaneReach()), []
    is_whole = False
    try:
        for chunk in chain.from_iterable(map(reader.feed, re.split(rb"(?<=\n\n)", data))):
            if chunk.timings is not None and chunk.processed is None:
                found += told.add(chunk)
            is_whole = chunk.last and chunk.final.get("stop_type") == "limit"
        found += told.end(is_whole=is_whole)
    except (ContradictionError, UnreadableError):
        pass
    return found


@cache
def whole(name: str) -> list[ObservedRound]:
    return rounds(stream_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_stream_never_changes_a_row_that_has_another_behind_it(name: str) -> None:
    data, every = stream_of(name), whole(name)
    chosen = random.Random(name)
    for cut in sorted(chosen.randrange(len(data)) for _ in range(60)):
        shown = rounds(data[:cut])
        for i, row in enumerate(shown[:-1]):
            if row.is_certain and row.n_merged == 1:
                full = next(one for one in every if one.first == row.first)
                assert (row.name_ms, row.drafted, row.accepted) == (
                    full.name_ms,
                    full.drafted,
                    full.accepted,
                )
                assert row.tokens == full.tokens, (cut, i)
                assert row.path in ("", full.path) or not full.path


@pytest.mark.parametrize("name", NAMES)
def test_sums_hold_wherever_a_stream_is_cut(name: str) -> None:
    data = stream_of(name)
    chosen = random.Random(name)
    for cut in sorted(chosen.randrange(len(data)) for _ in range(20)):
        store, run, request = begun()
        request.data(data[:cut], 10.0)
        request.broke("The connection was lost.", 11.0)
        run.end()
        told = store.runs[0]["requests"][0].get("told", {})
        for column, counter in (
            ("num_emitted", "predicted_n"),
            ("num_draft_tokens", "draft_n"),
            ("num_accepted_draft_tokens", "draft_n_accepted"),
        ):
            values = store.rounds.column(column)
            assert values[values != MISSING].sum() == told.get(counter, 0)
        assert [finding.rule for finding in find(store)] == ["stream-cut"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_counter_never_raises(data: st.DataObject) -> None:
    stream = stream_of(data.draw(st.sampled_from(NAMES)))
    counter = data.draw(st.sampled_from(COUNTERS))
    places = list(re.finditer(rb'"%s":([0-9.]+)' % counter, stream))
    at = data.draw(st.sampled_from(places))
    small = st.integers(-3, 3).map(lambda by: str(round(float(at[1])) + by))
    any_number = st.one_of(
        small,
        st.integers(-(2**70), 2**70).map(str),
        st.sampled_from(["NaN", "1e999", "-1", '"3"', "null", "true", "[]", "{}", "0.5", "1e9"]),
    )
    value = data.draw(any_number).encode()
    store, run, request = begun()
    request.data(stream[: at.start(1)] + value + stream[at.end(1) :], 5.0)
    request.done(6.0)
    run.end()
    assert run.ended
    n_rows = len(store.rounds)
    assert (store.rounds.column("num_emitted")[:n_rows] >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_inside_a_stream_never_raise(junk: bytes, at: int) -> None:
    data = stream_of("utf8")
    _store, run, request = begun()
    place = at * len(data) // 400
    request.data(data[:place] + junk + data[place:], 5.0)
    request.done(6.0)
    run.end()
    assert run.ended


def begun() -> tuple[TraceStore, ObservedRun, ObservedRequest]:
    """A run with one request whose reply is a stream of events."""
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    request = run.request("/completion", {"stream": True}, 0.0)
    request.head(200, {"content-type": "text/event-stream"}, 1.0)
    return store, run, request


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (b"data: " + b"x" * (17 << 20), "a line of more than 16 MiB"),
        (b"data: " + b"[" * 200_000 + b"\n\n", "nested more than 64 times"),
        (b'data: {"content": "a", "timings": {"predicted_n": NaN}}\n\n', "not valid JSON"),
        (b'data: {"content": "a", "timings": {"predicted_n": -4}}\n\n', "not a count"),
        (b'data: {"content": "a", "timings": {"predicted_n": 9, "predicted_ms": "x"}}\n\n', "time"),
        (b'data: {"index": 99999, "content": "a"}\n\n', "not the number of an answer"),
        (b"data: <html>\n\n", "not valid JSON"),
    ],
)
def test_what_cannot_be_read_ends_the_stream_in_a_sentence(harm: bytes, said: str) -> None:
    store, run, request = begun()
    data = stream_of("mtp")
    request.data(data[: len(data) // 2].rpartition(b"\n\n")[0] + b"\n\n", 5.0)
    request.data(harm, 6.0)
    request.data(data, 7.0)
    n_rows = len(store.rounds)
    assert n_rows > 10
    request.done(8.0)
    run.end()
    (finding,) = find(store)
    assert finding.rule == "stream-unreadable"
    assert said in finding.message
    assert len(store.rounds) >= n_rows


def test_a_billion_tokens_in_one_jump_are_refused() -> None:
    store, run, request = begun()
    data = stream_of("mtp")
    request.data(data[: len(data) // 2].rpartition(b"\n\n")[0] + b"\n\n", 5.0)
    timings: dict[str, Any] = {"predicted_n": 10**9, "predicted_ms": 1e6, "draft_n": 10**6}
    event = {"content": "a", "tokens": [1], "stop": False, "timings": timings}
    request.data(f"data: {json.dumps(event)}\n\n".encode(), 6.0)
    request.done(7.0)
    run.end()
    (finding,) = find(store)
    assert finding.rule == "counters-contradict"
    assert len(store.tokens) < 1000


def test_pieces_may_be_cut_anywhere() -> None:
    data = stream_of("utf8")
    store, run, request = begun()
    for at in range(0, len(data), 7):
        request.data(data[at : at + 7], 1.0 + at)
    request.done(1e6)
    run.end()
    every = whole("utf8")
    assert len(store.rounds) == len(every)
    assert store.rounds.column("num_emitted").tolist() == [one.emitted for one in every]


def test_an_error_inside_a_stream_keeps_its_rounds() -> None:
    store, run, request = begun()
    data = stream_of("mtp")
    request.data(data[: len(data) // 2].rpartition(b"\n\n")[0] + b"\n\n", 5.0)
    request.data(b'data: {"error":{"code":500,"message":"\\u001b[2Jinvalid\\nUTF-8"}}\n\n', 6.0)
    request.done(7.0)
    run.end()
    assert store.runs[0]["requests"][0]["error"] == "The server reported: �[2Jinvalid UTF-8"
    (finding,) = find(store)
    assert finding.rule == "stream-cut"
    assert "�[2Jinvalid UTF-8" in finding.message
    assert len(store.rounds) > 10


def test_a_stream_without_counters_gives_sums_only() -> None:
    store = TraceStore()
    run = ObservedRun(store, "ask", ServerFacts("http://127.0.0.1:1"))
    request = run.request("/v1/completions", {"stream": True}, 0.0)
    request.head(200, {"content-type": "text/event-stream"}, 1.0)
    for text in "abc":
        chunk = {"choices": [{"text": text, "index": 0, "finish_reason": None}]}
        request.data(f"data: {json.dumps(chunk)}\n\n".encode(), 2.0)
    timings = {"predicted_n": 3, "predicted_ms": 5.0, "prompt_n": 2, "prompt_ms": 1.0}
    last = {"choices": [{"text": "", "index": 0, "finish_reason": "stop"}], "timings": timings}
    request.data(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode(), 3.0)
    request.done(4.0)
    run.end()
    assert not len(store.rounds)
    assert request.text == "abc"
    assert store.runs[0]["requests"][0]["told"]["predicted_n"] == 3
    assert "per-token" in store.runs[0]["requests"][0]["no_rounds"]


@pytest.mark.parametrize("name", NAMES)
def test_events_that_come_together_are_those_that_come_alone(name: str) -> None:
    """Also with a comment, an error and a text that cannot be read between them."""
    data = re.split(rb"(?<=\n\n)", stream_of(name))
    for wrong in (b"", b": ping\n\n", b'data: {"error":"x"}\n\n', b"data: {x}\n\n"):
        pieces = [*data[: len(data) // 2], wrong, *data[len(data) // 2 :]]
        found = []
        for parts in (pieces, [b"".join(pieces)]):
            store, run, request = begun()
            for piece in parts:
                request.data(piece, 5.0)
            request.done(7.0)
            run.end()
            rows = [store.rounds.row(i) for i in range(len(store.rounds))]
            tokens = [store.tokens.row(i) for i in range(len(store.tokens))]
            found.append((rows, tokens, request.text, store.runs[0]["requests"]))
        assert found[0] == found[1]
        assert found[0][1]


def test_only_events_with_data_that_are_whole_count() -> None:
    reader = EventReader("text/event-stream")
    for piece in (b": ping\n\n", b"\n\n\n", b"event: x\n\n", b"id: 1\nretry: 5\n\n", b'data: {"a"'):
        assert not list(reader.feed(piece)) and reader.n_events == 0
    list(reader.feed(b":1}\n"))
    assert reader.n_events == 0
    list(reader.feed(b"\ndata: [DONE]\n\n"))
    assert reader.n_events == 2


_LINES = st.sampled_from(
    ("", "data: {1", "data:2", "data:  3", "data", "data: ", ":", ": x", "event: e", "id", "da")
) | st.sampled_from(("", "datax: 4", " data: 5", "retry: x", "data: a: b", "id: \0", "data\0: 6"))


def test_a_mark_before_the_first_event_is_no_part_of_it() -> None:
    reader = EventReader("text/event-stream")
    event = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
    assert [one.text for one in reader.feed(b"\xef\xbb\xbf" + 2 * event)] == ["a", "a"]


def test_a_line_that_ends_with_a_piece_ends_with_the_next_one() -> None:
    reader = EventReader("text/event-stream")
    assert not list(reader.feed(b'data: {"content": "a"}\n\r'))
    assert len(list(reader.feed(b"d"))) == 1


@given(st.lists(st.tuples(_LINES, st.sampled_from(["\n", "\r", "\r\n"])), max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_events_are_those_of_a_well_known_reader(lines: list[Any], data: st.DataObject) -> None:
    text = "".join(line + end for line, end in lines) + "x"
    decoder, wanted = SSEDecoder(), []
    for line in re.split("\r\n|\r|\n", text)[:-1]:
        event = decoder.decode(line)
        if event is not None and event.data:
            wanted.append(event.data)
    reader, found = EventReader("text/event-stream"), []

    def kept(raw: Any) -> Any:
        found.append(raw)
        return None

    cut = data.draw(st.integers(0, len(text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observed_request, "read_json", kept)
        for piece in (text[:cut], text[cut:]):
            assert not list(reader.feed(piece.encode()))
    assert found == [one for one in wanted if one.strip()]


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST_TEXT", 1000)
    store, run, request = begun()
    for piece in token_events(400):
        request.data(piece, 10.0)
    assert request.is_over and len(request.text) <= 1000
    assert "more than 1,000 characters" in request.known["error"]
    run.end()
    assert "stream-unreadable" in {one.rule for one in find(store)}


def test_a_piece_of_many_events_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many events a piece brings, every table grows once; and JSON is read once each."""
    grown: list[str] = []
    parsed: list[Any] = []
    for name in ("append", "extend"):
        whole = getattr(Table, name)

        def counted(table: Table, *args: Any, whole: Any = whole, **values: Any) -> Any:
            grown.append(table.name)
            return whole(table, *args, **values)

        monkeypatch.setattr(Table, name, counted)
    read = observed_request.read_json
    monkeypatch.setattr(observed_request, "read_json", lambda raw: parsed.append(raw) or read(raw))
    store, run, request = begun()
    request.data(b"".join(token_events(900)), 10.0)
    assert len(store.tokens) > 850 and len(store.rounds) > 280
    assert len(grown) <= 6 and len(parsed) == 900
    run.end()


def test_a_token_of_any_length_opens_again(tmp_path: Path) -> None:
    store, run, request = begun()
    long = [changed(event, {"content": "\u202e" * 500_000}) for event in token_events(9)]
    request.data(b"".join(long), 10.0)
    run.end()
    assert store.pieces
    export_csv(store, tmp_path / "trace")
    opened = open_trace(tmp_path / "trace")
    assert opened.pieces == store.pieces
    assert len(opened.tokens) == len(store.tokens)


def changed(event: bytes, said: dict[str, Any]) -> bytes:
    """An event with other values."""
    values = json.loads(event.removeprefix(b"data: ")) | said
    return b"data: " + json.dumps(values).encode() + b"\n\n"
