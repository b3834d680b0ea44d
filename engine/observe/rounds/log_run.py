"""A server's log by itself as a run of a trace."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import cache
from typing import Any

from engine.errors import TraceFileError
from engine.observe.rounds.log import LogReader, LogRequest
from engine.observe.rounds.log_prompts import note_prompts
from engine.observe.rounds.stream import Timings
from engine.observe.rounds.stream_and_log import path_of
from engine.observe.rounds.stream_rounds import ObservedRound, StreamedToken
from engine.observe.rounds.trace_rows import (
    LOG_COLUMNS,
    PromptPart,
    ReadyRow,
    RowWriter,
    told_figures,
)
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.store import TraceStore
from engine.trace.writer import RunSource, TraceWriter

_PIECE = 1 << 20


def fill_log(store: TraceStore, text: str | bytes, file: str) -> int:
    """Write a log as a run of a trace, a sequence for each of its requests; returns its id.

    file: its name. Raises TraceFileError for a text that is not a server's log, or has no rounds.
    """
    reader = LogReader()
    for piece in _pieces(text):
        reader.feed(piece)
    reader.end()
    if not any(request.rounds or request.first for request in reader.requests):
        unread = f" that can be read ({reader.first_unread})" if reader.n_unread else ""
        raise TraceFileError(
            f"{file} tells of no round{unread}.",
            "Start the server with -lv 5 and LLAMA_TRACE=1 in its environment.",
        )
    reach = PlaneReach()
    if reader.n_rs_seq is not None:
        reach.tell(reader.n_rs_seq)
    writer = TraceWriter.begin(
        store,
        RunSource("llama-server", reader.build),
        {
            "attachment": "light-log" if reader.is_light else "log",
            "file": file,
            "model": {"name": reader.model} if reader.model else None,
            "speculative_types": reader.drafters,
            "synthetic": reader.is_synthetic,
            "requests": [],
            "observed_findings": reader.unread,
        },
        columns=LOG_COLUMNS,
    )
    rows = RowWriter(writer, reach)
    rows.drafters, rows.log_pieces = reader.drafters, reader.pieces
    told = [_told(one) for one in reader.requests]
    for seq_id, (one, sums) in enumerate(zip(reader.requests, told, strict=True)):
        facts: dict[str, Any] = {
            "seq_ids": [seq_id],
            "slot": one.slot,
            "task": one.task,
            "complete": one.is_over,
        }
        if sums is not None:
            facts |= {"told": told_figures([sums], has_rows=True, has_times=True)}
        writer.facts.add_to("requests", facts)
    note_prompts(writer.facts, enumerate(one.prompt for one in reader.requests))
    ready = [
        row
        for seq_id, request in enumerate(reader.requests)
        for row in (_light(seq_id, request) if reader.is_light else _full(seq_id, request))
    ]
    begun = min((row.t_ms for row in ready), default=0.0)
    for row in sorted(ready, key=lambda one: one.t_ms):
        rows.write(row, begun)
    rows.flush()
    known = [sums for sums in told if sums is not None]
    if known and len(known) == len(told):
        writer.set_facts(told=told_figures(known, has_rows=True, has_times=True))
    writer.end(["end" if request.is_over else "lost" for request in reader.requests])
    return writer.run_id


def _full(seq_id: int, request: LogRequest) -> Iterator[ReadyRow]:
    """The prompt and the rounds of a request."""
    n_prompt, n_cached = request.n_prompt or 0, request.n_cached or 0
    if request.first is None:
        return
    begun_ms = (request.first_us or 0) / 1e3
    part = PromptPart(n_cached, max(n_prompt - n_cached, 0), request.prompt_ms or 0.0, 0.0)
    first = ObservedRound(0.0, 0.0, 0, 0, 1, _tokens([request.first]), "")
    yield ReadyRow(begun_ms, seq_id, n_prompt, first, part)
    number, before = 2, 0.0
    for i, one in enumerate(request.rounds):
        end_ms = one.end_us / 1e3 - begun_ms if one.end_us is not None else before
        is_cut = not request.is_closed(i)
        path = "" if is_cut and not one.is_complete else path_of(one)
        row = ObservedRound(
            max(end_ms, before),
            before,
            one.drafted,
            one.accepted,
            number,
            _tokens(one.tokens),
            path,
            is_cut=is_cut or len(one.tokens) < one.accepted + 1,
            log=one,
        )
        yield ReadyRow(begun_ms + row.name_ms, seq_id, n_prompt, row)
        number, before = number + row.emitted, row.name_ms


def _light(seq_id: int, request: LogRequest) -> Iterator[ReadyRow]:
    """The rounds with a draft; those without are not logged, nor is any token."""
    complete = [one for one in request.rounds if one.is_complete]
    if complete:  # what went before ended at some time before
        yield ReadyRow((complete[0].end_us or 0) / 1e3, seq_id, 0)
    n_left = None if request.predicted is None else max(request.predicted - 1, 0)
    for one in complete:
        n_tokens = one.accepted + 1 + one.restored
        is_cut = n_left is not None and n_tokens > n_left
        if n_left is not None:
            n_tokens = min(n_tokens, n_left)
            n_left -= n_tokens
        tokens = _unknown(n_tokens)
        row = ObservedRound(
            0.0, 0.0, one.drafted, one.accepted, 0, tokens, path_of(one), is_cut=is_cut, log=one
        )
        yield ReadyRow((one.end_us or 0) / 1e3, seq_id, 0, row)


def _pieces(text: str | bytes) -> Iterator[str]:
    if isinstance(text, str):
        yield text
        return
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    for at in range(0, len(text), _PIECE):
        yield decoder.decode(text[at : at + _PIECE])
    yield decoder.decode(b"", final=True)


@cache
def _unknown(n_tokens: int) -> tuple[StreamedToken, ...]:
    """Tokens of which only the number is known, the same for all rows."""
    return (StreamedToken(),) * n_tokens


def _tokens(logged: list[tuple[int, str]]) -> tuple[StreamedToken, ...]:
    return tuple(StreamedToken(token, text, "\ufffd" not in text) for token, text in logged)


def _told(request: LogRequest) -> Timings | None:
    """The server's own sums, where its log has them."""
    if request.predicted is None:
        return None
    n_prompt, n_cached = request.n_prompt or 0, request.n_cached or 0
    return Timings(
        n_cached,
        max(n_prompt - n_cached, 0),
        request.prompt_ms or 0.0,
        request.predicted,
        request.predicted_ms or 0.0,
        request.drafted or 0,
        request.accepted or 0,
    )
