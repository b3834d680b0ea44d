"""Captures: requests to a server and its replies, kept in a file.

The format is one JSON object, optionally gzipped; it holds everything that rounds are derived from,
so that improved rules can read old captures.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import TraceFileError
from engine.files import unpacked, written_whole
from engine.foreign import LONGEST_PART_MS, JsonError, is_real, is_whole, parse_json
from engine.observe.files.records.replies import PlainReplies
from engine.observe.rounds.kept_requests import RawRequest, RawStore, as_fact
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import (
    LLAMA_SERVER,
    OTHER_ENGINES,
    Attachment,
    ObservedRun,
    ServerFacts,
)
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.gguf.tokenizer import Tokenizer

MOST_BYTES = 128 << 20
"""Largest capture that is read, unpacked: twice what is kept of a run."""
_FORMATS = ("draftscope-capture", "draftscope-proxy-record")
_FACTS = {"about": "about", "args": "server_args", "engine": "captured_from"}
"""Keys of a capture and the corresponding facts of a run."""
_MARKS = re.compile(rb'"format"\s*:\s*"(%s)"|"log"\s*:\s*\[' % "|".join(_FORMATS).encode())
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_REMEDY = "Choose a capture that Draftscope wrote."


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything kept of an attachment. log: text of the server's log, empty without one."""

    name: str = ""
    props: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[RawRequest, ...] = ()
    log: str = ""
    metrics: tuple[str, str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def is_capture(data: bytes) -> bool:
    """Whether a file's first bytes may be a capture's."""
    head = unpacked(data, "", 1 << 12, whole=False).lstrip()[: 1 << 12]
    return head.startswith(b"{") and _MARKS.search(head) is not None


def read_capture(data: bytes, name: str) -> Capture:
    """Read a capture. name: of the file, for messages. Raises TraceFileError."""
    text = unpacked(data, name, MOST_BYTES, TraceFileError).decode("utf-8-sig", "replace")
    try:
        said = parse_json(text, whole_texts=True)
    except JsonError as error:
        raise TraceFileError(f"{name} is not valid JSON ({error}).", _REMEDY) from None
    if not isinstance(said, dict):
        raise TraceFileError(f"{name} is not a capture.", _REMEDY)
    requests = said.get("requests", said.get("records", []))
    log = said.get("log")
    if not isinstance(requests, list) or not (requests or log):
        raise TraceFileError(f"{name} has neither requests nor a log.", _REMEDY)
    if isinstance(log, list):
        log = "\n".join(line for line in log if isinstance(line, str))
    dated = [r for r in requests if isinstance(r, dict) and "t_unix" in r]
    first_unix = min((_time(name, r["t_unix"], "t_unix", 0.0) for r in dated), default=0.0)
    places = (f"{name}: request {number + 1}" for number in range(len(requests)))
    return Capture(
        name,
        _object(said.get("props")),
        _object(said.get("models")),
        tuple(map(_request, requests, places, repeat(first_unix))),
        log if isinstance(log, str) else "",
        _metrics(said),
        {_FACTS[key]: said[key] for key in _FACTS if key in said},
    )


def replay(
    capture: Capture,
    store: TraceStore,
    *,
    attachment: Attachment = "record",
    log: str = "",
    file: str = "",
    vocabulary: Tokenizer | None = None,
) -> int:
    """Write a capture as a run of a trace; returns its id.

    log: text of the server's log, if the capture has none. file: name of the capture's file.
    vocabulary: of the server's model, for missing ids. Raises TraceFileError for an unreadable log.
    """
    how: Any = attachment, log or capture.log, file, vocabulary
    run = _replayed(capture, store, None, *how)
    if run.reach.is_late:
        del store.runs[run.run_id]  # none of its rows is written yet
        run = _replayed(capture, store, run, *how)
    if capture.metrics is not None:
        with suppress(ValueError):  # invalid text is ignored
            run.counters(*capture.metrics)
    run.end()
    return run.run_id


def _replayed(
    capture: Capture, store: TraceStore, known: ObservedRun | None, *how: Any
) -> ObservedRun:
    """The run of a capture, not ended. known: an earlier run of it from which its server is known.
    how: attachment, log, file and vocabulary of `replay`."""
    attachment, log, file, vocabulary = how
    said = dict(capture.facts).get("captured_from")
    engine = said if isinstance(said, str) and said in OTHER_ENGINES else LLAMA_SERVER
    server = ServerFacts(capture.name or file, engine, capture.props, capture.models)
    facts = {key: as_fact(value) for key, value in capture.facts.items()}
    run = ObservedRun(
        store,
        attachment,
        server,
        patience_ms=math.inf,
        known=known,
        keep_raw=False,
        vocabulary=vocabulary,
        plain=PlainReplies(),
        **{"record": {"file": file}, **facts},
    )
    if log:
        run.log(log)
        run.log_ended()
    open_requests: dict[int, ObservedRequest] = {}
    held: dict[int, list[bytes]] = {}
    is_counted = set[int]()
    for at_ms, _, number, what, value in sorted(_events(capture)):
        request = capture.requests[number]
        if what == "sent":
            asked = "timings_per_token" in request.body
            open_requests[number] = run.request(
                request.path, request.body, at_ms, streamed_by_us=not asked
            )
            continue
        observed = open_requests[number]
        if what == "data":
            held.setdefault(number, []).append(value)
            # only the first counters give the time of arrival
            if not log and (number in is_counted or b'"predicted_n"' not in value):
                continue
        if pieces := held.pop(number, None):
            observed.data(b"".join(pieces), at_ms)
            is_counted |= {number} if any(observed.told) else set()
        if what == "head":
            observed.head(request.status, {"Content-Type": request.content_type}, at_ms)
        elif what == "data":
            continue
        elif request.has_left:
            observed.left(at_ms)
        elif request.broke:
            observed.broke(request.broke, at_ms)
        else:
            observed.done(at_ms)
    return run


def _events(capture: Capture) -> Iterator[tuple[float, int, int, str, bytes]]:
    """All events in order: time, order at equal times, request, kind, bytes."""
    order = 0
    for number, one in enumerate(capture.requests):
        at = one.sent_ms
        for what, when, value in (
            ("sent", one.sent_ms, b""),
            ("head", one.head_ms, b""),
            *(("data", when, piece) for when, piece in one.pieces),
            ("done", one.done_ms, b""),
        ):
            at, order = max(at, when), order + 1
            yield at, order, number, what, value


def capture_of(run: ObservedRun, name: str = "") -> Capture:
    """Everything kept of a run's requests and replies."""
    raw = run.raw if run.raw is not None else RawStore()
    cut = "The rest of the reply was not kept, because of the size limit."
    requests = tuple(
        replace(one, pieces=one.pieces.copy(), broke=one.broke if one.is_whole else cut)
        for one in raw.requests
    )
    return Capture(
        name,
        run.server.props,
        run.server.models,
        requests,
        "".join(raw.log),
        raw.metrics,
        {"captured_from": run.server.engine},
    )


def write_capture(path: Path, capture: Capture) -> None:
    """Write a capture atomically, gzipped if the name ends with .gz. Raises TraceFileError."""
    known = capture.facts
    said: dict[str, Any] = {
        "format": _FORMATS[0],
        "version": 1,
        "name": capture.name,
        **{key: known[name] for key, name in _FACTS.items() if name in known},
        "props": capture.props,
        "models": capture.models,
        "requests": [_written(one) for one in capture.requests],
    }
    if capture.log:
        said["log"] = capture.log.split("\n")
    if capture.metrics is not None:
        for key, text in zip(("metrics_before", "metrics_after"), capture.metrics, strict=True):
            said[key] = {"text": text}
    data = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with written_whole(path, TraceFileError) as part:
        part.write_bytes(data)


def _written(one: RawRequest) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "sent_ms": one.sent_ms,
        "status": one.status,
        "headers": {"Content-Type": one.content_type},
        "head_ms": one.head_ms,
        "done_ms": one.done_ms,
    }
    if "event-stream" in one.content_type:
        reply["events"] = [[at, event] for at, event in _cut_events(one.pieces)]
    else:
        reply["body"] = b"".join(piece for _, piece in one.pieces).decode("utf-8", "replace")
    found: dict[str, Any] = {"path": one.path, "body": one.body, "reply": reply}
    if one.has_left:
        found["abort_after"] = len(reply.get("events", ()))
    if one.broke:
        found["broke"] = one.broke
    return found


def _cut_events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Events with the time of their completion; the rest is one by itself."""
    rest, at = bytearray(), 0.0
    for at, piece in pieces:
        looked_at = max(len(rest) - 3, 0)  # an event's end may be split
        rest += piece
        while (end := _EVENT_END.search(rest, looked_at)) is not None:
            yield at, _event_text(rest[: end.start()])
            del rest[: end.end()]
            looked_at = 0
    if rest.strip():
        yield at, _event_text(rest)


def _event_text(event: bytearray) -> str:
    return event.replace(b"\r\n", b"\n").decode("utf-8", "replace")


def _request(one: Any, place: str, first_unix: float) -> RawRequest:
    """A request of a capture, or of a proxy's record, in which the reply is flat and times count
    from its own start."""
    if not isinstance(one, dict):
        raise TraceFileError(f"{place} is not an object.", _REMEDY)
    reply = one.get("reply", one)
    if not isinstance(reply, dict) or not isinstance(one.get("path"), str):
        raise TraceFileError(f"{place} has no path or no reply.", _REMEDY)
    begun = (_time(place, one.get("t_unix"), "t_unix", first_unix) - first_unix) * 1e3
    if begun > LONGEST_PART_MS:
        raise TraceFileError(f"{place} has a time years after the first one.", _REMEDY)
    headers = reply.get("headers")
    kinds = {str(k).lower(): v for k, v in headers.items()} if isinstance(headers, dict) else {}
    sent = begun + _time(place, reply.get("sent_ms"), "sent_ms", 0.0)
    head = max(begun + _time(place, reply.get("head_ms"), "head_ms", 0.0), sent)
    pieces: list[tuple[float, bytes]] = []
    events = reply.get("events")
    if isinstance(events, list):
        for event in events:
            if not (isinstance(event, list) and len(event) == 2 and isinstance(event[1], str)):
                raise TraceFileError(
                    f"{place} has an event that is not a pair of time and text.", _REMEDY
                )
            at = begun + _time(place, event[0], "time", 0.0)
            pieces.append((at, event[1].encode("utf-8", "replace") + b"\n\n"))
    else:
        text = reply.get("body") if reply is not one else reply.get("text")
        if isinstance(text, str):
            pieces.append((head, text.encode("utf-8", "replace")))
    kind = kinds.get("content-type", "text/event-stream" if isinstance(events, list) else "")
    if reply is one:  # in a proxy's record the headers are the request's
        kind = "text/event-stream" if isinstance(events, list) else "application/json"
    status = reply.get("status", 200)
    broke = one.get("broke")
    return RawRequest(
        one["path"][:1000],
        _object(one.get("body")),
        sent,
        head,
        max(begun + _time(place, reply.get("done_ms"), "done_ms", 0.0), head),
        status if is_whole(status, 999) else 200,
        kind if isinstance(kind, str) else "",
        pieces,
        has_left=bool(one.get("abort_after")),
        broke=broke if isinstance(broke, str) else "",
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _time(place: str, value: Any, name: str, default: float) -> float:
    if value is not None and not is_real(value):
        raise TraceFileError(f"{place}: {name} is {str(value)[:40]}, which is not a time.", _REMEDY)
    return default if value is None else float(value)


def _metrics(said: dict[str, Any]) -> tuple[str, str] | None:
    keys = "metrics_before", "metrics_after"
    before, after = (_object(said.get(key)).get("text") for key in keys)
    return (before, after) if isinstance(before, str) and isinstance(after, str) else None
