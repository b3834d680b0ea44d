"""Recorded requests as runs of a trace."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec
import numpy as np

from engine.analysis.findings.check import record_findings
from engine.errors import check_most
from engine.foreign import is_real
from engine.long_work import watched
from engine.observe.files.records.document import MOST_STEPS, Node
from engine.observe.files.records.readers import LLAMA_SERVER
from engine.observe.files.records.replies import KeptReply, PlainReplies, kept_replies
from engine.observe.files.records.request import RecordedRequest, sum_figures
from engine.observe.rounds.kept_requests import asked_facts
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.observe.rounds.server_log import MOST_REQUESTS
from engine.observe.rounds.trace_rows import COLUMNS, LONGEST_TOKEN, TokenRun, states, write_runs
from engine.trace.facts import SourceFacts
from engine.trace.records import MISSING
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

_MOST_KEPT = 12 << 20
_MOST_FACTS = 48 << 20
"""Bytes of compact JSON: session.json has four times as many, and must open again."""
_NO_STOP = "not reported"
_LONGEST_PLACE = 1000
_OF_STEPS = states(
    "round num_emitted stop_kind rollback_depth verify_width pos0",
    "num_draft_tokens num_accepted_draft_tokens",
)
_OF_SUMS = dict.fromkeys(_OF_STEPS, "absent")


def write_requests(
    store: TraceStore,
    requests: Sequence[RecordedRequest],
    shape: str,
    file: str,
    unknown: Mapping[str, Any] | None = None,
    *,
    left_out: str = "",
    version: str = "",
    facts: Mapping[str, Any] | None = None,
    about: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Write one run with a sequence for each request, in order; returns its id.

    shape: kind of the records. unknown: what else the file contains. left_out: a sentence on unread
    lines. version: of the engine. facts: of the run, about: of each request, replacing those
    derived from the requests. Requests with per-step lists become rows, others sums in the run's
    facts `told` and, by sequence, `requests`. Raises TraceFileError for more than a trace can hold.
    """
    check_most(file, len(requests), MOST_REQUESTS, "requests")
    names = "per_step_accepted", "per_step_drafted"
    steps = max(sum(len(getattr(one, name) or ()) for one in requests) for name in names)
    check_most(file, steps, MOST_STEPS, "steps in its lists")
    engines = list(dict.fromkeys(request.engine for request in requests if request.engine))
    unknown = unknown or {}
    models = list(dict.fromkeys(request.model for request in requests if request.model))
    more = dict(facts or {})
    kept = _facts(requests)
    for one, further in zip(kept, about, strict=False):
        one.update(further)
    facts = {
        "attachment": "record",
        "record": {"file": file, "shape": shape},
        "requests": kept,
        "unknown_keys": sorted({*unknown, *(key for r in requests for key in r.unknown)}),
        "told": sum_figures(requests),
        "observed_findings": [
            *(_contradiction(i, r) for i, r in enumerate(requests) if r.contradictions),
            *_unread(left_out),
            *more.pop("observed_findings", []),
        ],
        "derived": sorted({name for request in requests for name in request.derived}),
    }
    if unknown:
        facts |= {"unknown": dict(unknown)}
    if models:
        facts |= {"model": {"name": ", ".join(models)}}
    facts |= more
    n_kept, of = len(msgspec.json.encode(facts)), "bytes about its requests"
    check_most(file, n_kept, _MOST_FACTS, of)
    has_steps = any(one.has_steps for one in requests)
    columns: dict[str, Mapping[str, str]] = {"rounds": _OF_STEPS if has_steps else _OF_SUMS}
    if any(request.tokens[0] or request.prompt_ids for request in requests):
        columns["tokens"] = COLUMNS["tokens"]
    writer = TraceWriter.begin(
        store, SourceFacts(", ".join(engines), version), facts, columns=columns
    )
    rows = _NewRows(writer)
    for seq_id, request in enumerate(requests):
        if not (request.has_steps and _write_rows(rows, seq_id, request)):
            _write_plain_tokens(rows, seq_id, request)
        request.tokens, request.chunks, request.record = ((), ()), (), {}  # the trace has them
        request.per_step_drafted = request.per_step_accepted = None
    rows.write()
    writer.end([request.stop or _NO_STOP for request in requests])
    record_findings(store, [writer.run_id])
    return writer.run_id


def _facts(requests: Sequence[RecordedRequest]) -> list[dict[str, Any]]:
    """Facts of each request. Unknown contents are reduced to keys above a limit."""
    found, n_kept = [], 0
    for seq_id, request in enumerate(requests):
        one: dict[str, Any] = {
            "seq_ids": [seq_id],
            "place": request.place[-_LONGEST_PLACE:],
            "engine": request.engine,
            "told": request.figures(),
            "record": request.record,
        }
        if request.has_steps:  # the rows have them
            lists = ("per_step_accepted", "per_step_drafted")
            one["record"] = {k: v for k, v in request.record.items() if k not in lists}
        one |= asked_facts(request.asked)
        if request.text:
            one["text"] = request.text
        if request.unknown:
            if n_kept <= _MOST_KEPT:
                n_kept += len(msgspec.json.encode(request.unknown))
            keep_all = n_kept <= _MOST_KEPT
            one["unknown"] = request.unknown if keep_all else sorted(request.unknown)
        found.append(one)
    return found


def _contradiction(seq_id: int, request: RecordedRequest) -> dict[str, Any]:
    """The finding shown by the rule of that name."""
    keys = dict.fromkeys(key for names, _ in request.contradictions for key in names)
    first, *others = (sentence for _, sentence in request.contradictions)
    where = f" of {request.place[-_LONGEST_PLACE:]}" if request.place else ""
    return {
        "rule": "counters-contradict",
        "seq_id": seq_id,
        "message": f"The counts{where} contradict each other, so these figures are left out: "
        f"{first}.",
        "evidence": "; ".join([", ".join(keys), *others]),
    }


class _NewRows:
    """Rows of `rounds`, collected by column, and of `tokens`: a million are written at once."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer, self.n = writer, 0
        self._requests: list[tuple[int, int]] = []
        """Sequences, and number of rows of each."""
        self._columns = {name: array("q") for name in _COLUMNS}
        self._runs: list[TokenRun] = []

    def add(self, seq_id: int, first: Sequence[Any], *steps: list[int] | None) -> None:
        """Add a row for the prompt, and one for each step, by column."""
        n = max(len(one) for one in steps if one is not None)
        self._requests.append((seq_id, 1 + n))
        self.n += 1 + n
        for column, value, each in zip(self._columns.values(), first, steps, strict=True):
            column.append(MISSING if value is None else value)
            column.fromlist([MISSING] * n if each is None else each)

    def add_tokens(self, *run: Any) -> None:
        """Add consecutive tokens, as a `TokenRun`."""
        self._runs.append(run)
        if len(self._runs) >= _MOST_RUNS:
            self.write_tokens()

    def write_tokens(self) -> None:
        """Write the added tokens to the trace."""
        if self._runs:
            write_runs(self.writer, self._runs)
        self._runs = []

    def write(self) -> None:
        """Write the added rows to the trace."""
        self.write_tokens()
        if not self.n:
            return
        columns: dict[str, Any] = {k: np.frombuffer(v, np.int64) for k, v in self._columns.items()}
        _, drafted, accepted, emitted, width = columns.values()
        is_step, is_whole = drafted != MISSING, accepted == drafted
        codes = np.array(self.writer.store.text_pool.codes(_STOPS), np.int32)
        is_end = is_step & (emitted <= accepted)
        kind = np.select([emitted == MISSING, is_end, drafted <= 0, is_whole], codes[1:], codes[0])
        seq_ids, n_each = zip(*self._requests, strict=True)
        columns |= {
            "round": np.arange(self.n),
            "seq_id": np.repeat(seq_ids, n_each),
            "stop_kind": kind,
            "rollback_depth": np.where(is_step, drafted - accepted, MISSING),
            "verify_width": np.where(is_step, drafted + 1, width),
        }
        self.writer.extend("rounds", columns)


_STOPS = ("replacement", "", "end", "target", "bonus")
_TOKEN = ("round", "seq_id", "pos", "kind", "token_id", "text", "draft_index")
_MOST_RUNS = 1 << 10
_COLUMNS = ("pos0", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted", "verify_width")


def _write_rows(rows: _NewRows, seq_id: int, request: RecordedRequest) -> bool:
    """Add a row for the prompt and one for each step; returns whether tokens were added too."""
    has_tokens = False
    drafted, accepted = request.per_step_drafted or [], request.per_step_accepted or []
    completion = request.timings.get("predicted_n")
    emitted = _emitted(accepted, None if completion is None else int(completion))
    first, *sizes = [len(ids) for ids, _ in request.chunks if ids] or [0]
    if first == 1 and len(sizes) == len(accepted) and 1 + sum(sizes) == completion:
        emitted = sizes  # unchanged, whatever is counted
    pos0 = request.prompt_tokens
    # with rounds missing from the lists, the start of a step is unknown
    is_ordered = pos0 is not None and emitted is not None and 1 + sum(emitted) == completion
    positions = None
    if is_ordered and emitted is not None:
        has_tokens = _write_tokens(rows, seq_id, request, emitted)
        positions = [*accumulate(emitted[:-1], initial=pos0)][: len(drafted)]
    first_row = request.timings.get("cache_n"), None, None, 1, request.timings.get("prompt_n")
    rows.add(seq_id, first_row, positions, drafted, accepted, emitted, None)
    return has_tokens


def _write_plain_tokens(rows: _NewRows, seq_id: int, request: RecordedRequest) -> None:
    """Add prompt and output of a request whose tokens belong to unknown rounds."""
    if not (request.tokens[0] or request.prompt_ids):
        return
    (token_ids, texts), n_prompt = request.tokens, request.prompt_tokens
    n_known = _write_prompt(rows, seq_id, request)
    if texts.count(None) < len(texts):
        texts = [(text or "")[:LONGEST_TOKEN] for text in texts]
    pos = n_known if n_prompt is None else n_prompt
    rows.add_tokens(rows.n, seq_id, pos, "unknown", token_ids, texts)


def _write_prompt(rows: _NewRows, seq_id: int, request: RecordedRequest) -> int:
    """Add ids of the prompt if their number is right; returns its number of tokens."""
    ids, n = request.prompt_ids, request.prompt_tokens
    if not ids or (n is not None and len(ids) != n):
        return 0
    rows.add_tokens(rows.n, seq_id, 0, "prompt", ids, ())
    return len(ids)


def _emitted(accepted: list[int], completion: int | None) -> list[int] | None:
    """Tokens that each step added to the output: the accepted ones plus one, and the rest for the
    last. None if the sum does not determine it."""
    if completion is None:
        return None
    whole = [a + 1 for a in accepted]
    left = completion - 1 - sum(whole[:-1])
    if whole and left < 1:
        return None
    return [*whole[:-1], min(whole[-1], left)] if whole else []


def _write_tokens(
    rows: _NewRows, seq_id: int, request: RecordedRequest, emitted: list[int]
) -> bool:
    """Add ids of the output if the stream's chunks equal the steps; returns whether they do. In a
    chunk of several tokens the borders in its text are unknown."""
    chunks = [chunk for chunk in request.chunks if chunk[0]]
    if [len(ids) for ids, _ in chunks] != [1, *emitted] or request.prompt_tokens is None:
        return False
    _write_prompt(rows, seq_id, request)
    rows.write_tokens()
    pos, round_ = request.prompt_tokens, rows.n
    found: list[Any] = []
    steps = zip(request.per_step_drafted or [], request.per_step_accepted or [], strict=True)
    for i, ((ids, text), (drafted, accepted)) in enumerate(
        zip(chunks, chain([(0, 0)], steps), strict=True), round_
    ):
        last = "target" if not drafted else "bonus" if accepted == drafted else "replacement"
        n = min(accepted, len(ids) - (i + 1 < round_ + len(chunks)))
        kinds = ["accepted"] * n + [last] * (len(ids) - n)
        for j, (token_id, kind) in enumerate(zip(ids, kinds, strict=True)):
            of_token = token_id, text if len(ids) == 1 else None, j if j < n else None
            found += i, seq_id, pos, kind, *of_token
            pos += 1
    rows.writer.append_rows("tokens", _TOKEN, found)
    return True


def write_replies(
    store: TraceStore,
    replies: list[KeptReply],
    timings: Sequence[Node],
    file: str,
    left_out: str = "",
    cancelled: Callable[[], bool] | None = None,
) -> int:
    """Write replies of llama-server, removing them from the list, as a run with a sequence for each
    answer; returns its id.

    timings: objects without a reply around them. left_out: a sentence on unread lines.
    """
    record = {"file": file, "shape": LLAMA_SERVER.name}
    run = ObservedRun(
        store,
        "record",
        ServerFacts(""),
        patience_ms=math.inf,
        keep_raw=False,
        plain=PlainReplies(),
        record=record,
    )
    alone = [(node.place, {"content": "", "timings": node.values}) for node in timings]
    waiting = deque((*replies, *kept_replies(alone)))
    replies.clear()  # so that each is freed when it is written
    for _ in watched(range(len(waiting)), cancelled):
        reply = waiting.popleft()
        *_, last = events = list(reply.events)
        known = [one for one in events if isinstance(one, dict)]
        if not any("stop" in one or "choices" in one or "type" in one for one in known):
            events[-1] = last | {"stop": True}  # a part of a reply, without its end
        body = {"prompt": last["prompt"]} if "prompt" in last else {}
        now = _first_ms(known)  # the request then began at 0
        request = run.request("", {**body, **reply.request}, 0.0)
        request.learn(place=reply.place[-_LONGEST_PLACE:])
        request.head(200, {"content-type": "text/event-stream"}, now)
        request.events(events, now)
        request.done(now)
    for one in _unread(left_out):
        run.find(one["rule"], one["message"], one["evidence"])
    run.end()
    record_findings(store, [run.run_id])
    return run.run_id


def _first_ms(events: Sequence[Mapping[str, Any]]) -> float:
    """The server's clock at the first timings of a stream, 0 for a reply in one piece."""
    if len(events) < 2:
        return 0.0
    told = (one["timings"] for one in events if isinstance(one.get("timings"), dict))
    first: Mapping[str, Any] = next(told, {})
    times = [first.get(name) for name in ("prompt_ms", "predicted_ms")]
    return sum(float(time) for time in times if is_real(time))


def _unread(left_out: str) -> list[dict[str, Any]]:
    message = f"Not all of the file could be read: {left_out}."
    return [{"rule": "log-unread", "message": message, "evidence": left_out}] if left_out else []
