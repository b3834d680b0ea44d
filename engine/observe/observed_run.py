"""What was sent to a server and what came back becomes one run of a trace.

Live clients, the proxy and files of captures all write through here: bytes go in as they arrived,
rows of rounds come out once they are settled. What a server does not tell stays empty.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from engine.observe.counters import (
    ACCEPTED,
    DRAFTED,
    PREDICTED,
    PROMPT,
    counted,
    differences,
    movement,
    read_counters,
)
from engine.observe.fill import COLUMNS, PromptPart, ReadyRow, RowWriter, Vocabulary, told_figures
from engine.observe.join import AnotherRunError, LogJoin
from engine.observe.log import LogReader, file_name
from engine.observe.raw import RawRequest, RawStore
from engine.observe.rounds import ContradictionError, ObservedRound, StreamRounds
from engine.observe.shares import PlaneReach
from engine.observe.stream import (
    MOST_ANSWERS,
    Chunk,
    EventReader,
    Timings,
    UnreadableError,
    read_json,
)
from engine.trace.store import TraceStore
from engine.trace.writer import RunSource, TraceWriter

Attachment = Literal["ask", "proxy", "log", "light-log", "record"]
"""How a server was observed."""

_PATIENCE_MS = 2000.0
"""So long a settled row waits for others that may have ended earlier."""
_LONGEST_TEXT = 1 << 16
_MOST_SEQUENCES = 1 << 16


@dataclass(frozen=True)
class ServerFacts:
    """What is known of a server before the first request. props, models: its replies to /props and
    /v1/models as they came, empty where it gave none. No keys, no headers of requests."""

    address: str
    engine: str = "llama-server"
    props: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)


class ObservedRequest:
    """One request within a run, and so one sequence or, for several prompts, several of them.

    Times are milliseconds since the run began, on this machine's clock.
    """

    def __init__(
        self, run: ObservedRun, number: int, path: str, body: Mapping[str, Any], at_ms: float
    ) -> None:
        self._run, self._body, self._sent_ms = run, body, at_ms
        self._raw = run.keep(path, body, at_ms)
        self._reader = EventReader()
        self._status: int | None = None
        self._is_over = False
        self._answers: dict[int, _Answer] = {}
        self.facts: dict[str, Any] = {
            "number": number,
            "path": path,
            "sent_ms": at_ms,
            "settings": _settings(body),
            "prompt": _prompt_text(body),
            "messages": _messages(body),
            "complete": False,
        }
        if run.has_room:
            self._answer(0)
        else:
            self._is_over = True
            run.leave_out()

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Its sequences in the trace, by index of the reply."""
        return tuple(self._answers[index].seq_id for index in sorted(self._answers))

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "\n".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """The same of each answer, as `seq_ids`."""
        return tuple("".join(self._answers[i].texts) for i in sorted(self._answers))

    @property
    def told(self) -> tuple[Timings | None, ...]:
        """The server's own counters by index of the reply, as they were told last."""
        return tuple(self._answers[index].told for index in sorted(self._answers))

    @property
    def is_over(self) -> bool:
        """Whether the reply has ended, or is not read any further."""
        return self._is_over

    def head(self, status: int, headers: Mapping[str, str], at_ms: float) -> None:
        """The reply began. headers: of the reply."""
        kinds = [value for name, value in headers.items() if name.lower() == "content-type"]
        self._reader = EventReader(kinds[0] if kinds else "")
        self._status = status
        self.learn(status=status)
        if self._raw is not None:
            self._raw.status, self._raw.head_ms = status, at_ms
            self._raw.content_type = kinds[0] if kinds else ""

    def data(self, piece: bytes, at_ms: float) -> None:
        """A piece of the reply's body, cut anywhere. Never raises for what a server may send."""
        if self._is_over:
            return
        if self._raw is not None and self._run.raw is not None:
            self._run.raw.data(self._raw, piece, at_ms)
        try:
            for chunk in self._reader.feed(piece):
                self._take(chunk, at_ms)
        except UnreadableError as error:
            self._refuse("stream-unreadable", f"The server {error}", at_ms)
        self._run.release(at_ms)

    def done(self, at_ms: float) -> None:
        """The reply ended by itself."""
        if self._is_over:
            return
        try:
            for chunk in self._reader.end():
                self._take(chunk, at_ms)
        except UnreadableError as error:
            self._refuse("stream-unreadable", f"The server {error}", at_ms)
            return
        open_ones = [one for one in self._answers.values() if not (one.is_last or one.is_broken)]
        if self._status is not None and self._status >= 400:
            self._fail(f"The server answered {self._status}.")
        elif open_ones:
            self._cut("The reply ended before the answer was complete.", open_ones)
        else:
            self.learn(complete="error" not in self.facts)
        self._end(at_ms)

    def broke(self, reason: str, at_ms: float) -> None:
        """The reply was cut short. reason: one sentence for the user."""
        if self._is_over:
            return
        if self._raw is not None:
            self._raw.broke = reason
        open_ones = [one for one in self._answers.values() if not (one.is_last or one.is_broken)]
        if open_ones:
            self._cut(reason, open_ones)
        else:
            self.learn(complete=True)
        self._end(at_ms)

    def left(self, at_ms: float) -> None:
        """The client has left, or was told to: no fault of the server."""
        if self._is_over:
            return
        if self._raw is not None:
            self._raw.has_left = True
        for answer in self._answers.values():
            answer.stop = answer.stop or "stopped"
        self._end(at_ms)

    def learn(self, **facts: Any) -> None:
        """Add to what is known of the request, and so of each of its sequences."""
        self.facts.update(facts)
        for answer in self._answers.values():
            answer.facts.update(facts)

    def _fail(self, error: str) -> None:
        """The first error counts."""
        if "error" not in self.facts:
            self.learn(error=error)

    def _cut(self, reason: str, answers: Iterable[_Answer]) -> None:
        self._fail(reason)
        for answer in answers:
            answer.stop = answer.stop or "lost"
            self._run.find(
                "stream-cut", reason, f"{answer.n_tokens} tokens had arrived", seq_id=answer.seq_id
            )

    def _end(self, at_ms: float) -> None:
        self._is_over = True
        if self._raw is not None and math.isfinite(at_ms):
            self._raw.done_ms = at_ms
        for answer in self._answers.values():
            try:
                answer.end(at_ms)
            except ContradictionError as error:
                self._contradicts(answer, error)
        self._run.release(at_ms)

    def _answer(self, index: int) -> _Answer:
        while len(self._answers) <= index:
            number = len(self._answers)
            answer = _Answer(self._run, self._body, number, self._run.n_answers, self._sent_ms)
            answer.facts.update(self.facts, index=number, seq_ids=[answer.seq_id])
            self._run.join(answer)
            self._answers[number] = answer
        return self._answers[index]

    def _take(self, chunk: Chunk, at_ms: float) -> None:
        if chunk.error:
            self._fail(f"The server reported: {chunk.error}")
            for answer in self._answers.values():
                answer.stop = answer.stop or "error"
            return
        if chunk.index not in self._answers and not self._run.has_room:
            return
        answer = self._answer(chunk.index)
        if answer.is_broken:
            return
        try:
            answer.take(chunk, at_ms)
        except ContradictionError as error:
            self._contradicts(answer, error)
        if chunk.last:
            self._learn_final(answer, chunk)

    def _contradicts(self, answer: _Answer, error: ContradictionError) -> None:
        answer.is_broken, answer.stop = True, answer.stop or "failed"
        self._run.find(
            "counters-contradict",
            f"The counters of sequence {answer.seq_id} contradict each other: {error}.",
            f"behind token {answer.n_tokens}; nothing behind it is shown",
            seq_id=answer.seq_id,
        )

    def _refuse(self, rule: str, message: str, at_ms: float) -> None:
        """The reply is not read any further; what came before stays."""
        self._fail(f"{message}.")
        for answer in self._answers.values():
            if not answer.is_last:
                answer.stop = answer.stop or "failed"
                self._run.find(
                    rule, f"{message}.", f"behind token {answer.n_tokens}", seq_id=answer.seq_id
                )
        self._end(at_ms)

    def _learn_final(self, answer: _Answer, chunk: Chunk) -> None:
        final = chunk.final
        answer.is_last = True
        answer.stop = answer.stop or _stop(final)
        for name in ("generation_settings", "stop_type", "stopping_word", "system_fingerprint"):
            if name in final:
                answer.facts[name] = as_fact(final[name])
        settings = final.get("generation_settings")
        if isinstance(settings, dict):
            types = settings.get("speculative.types")
            if isinstance(types, str):
                self._run.learn_drafters(types)


class ObservedRun:
    """A run that is observed, from the first request until it is closed. One thread writes it."""

    def __init__(
        self,
        store: TraceStore,
        attachment: Attachment,
        server: ServerFacts,
        *,
        patience_ms: float = _PATIENCE_MS,
        known: ObservedRun | None = None,
        keep_raw: bool = True,
        vocabulary: Vocabulary | None = None,
        **facts: Any,
    ) -> None:
        """Begin a run. facts: JSON-able, whatever else is known of it.

        patience_ms: so long a row may wait for others that ended earlier; rows are numbered by the
        end of their rounds. known: another run of the same server, which tells how deep its planes
        reach. keep_raw: keep what is sent and received, for `capture`. vocabulary: of the model,
        for ids that are not told.
        """
        self.server = server
        build = server.props.get("build_info")
        version = build if isinstance(build, str) else ""
        self._reach = known.reach if known is not None else PlaneReach()
        self.raw = RawStore() if keep_raw else None
        self._requests: list[ObservedRequest] = []
        self._answers: list[_Answer] = []
        self._current: list[_Answer] = []
        self._ready: list[tuple[float, int, int, ReadyRow]] = []
        self._n_ready = 0
        self._patience_ms = patience_ms
        self._log: LogReader | None = None
        self._in_log: set[int] = set()
        self._writer = TraceWriter.begin(
            store,
            RunSource(server.engine, version),
            {
                "attachment": attachment,
                "server": _server(server),
                "model": _model(server),
                "requests": [],
                "observed_findings": [],
            }
            | facts,
            columns=COLUMNS if vocabulary is None else _with_derived_ids(COLUMNS),
        )
        self.run_id = self._writer.run_id
        self._rows = RowWriter(self._writer, self._reach, vocabulary)
        self.vocabulary = vocabulary
        self._rows.drafters = known.drafters if known is not None else []

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._writer.ended

    def request(
        self,
        path: str,
        body: bytes | Mapping[str, Any],
        at_ms: float,
        *,
        streamed_by_us: bool = True,
    ) -> ObservedRequest:
        """A request was sent. body: its JSON. streamed_by_us: whether per-token timings were asked
        for on behalf of a client that did not."""
        if isinstance(body, bytes):
            try:
                body = read_json(body)
            except UnreadableError:
                body = {}
        body = body if isinstance(body, Mapping) else {}
        found = ObservedRequest(self, len(self._requests), path, body, at_ms)
        if streamed_by_us and "timings_per_token" not in body:
            found.learn(timings_added=True)
        self._requests.append(found)
        return found

    def log(self, text: str) -> None:
        """Lines that the server wrote into its log, cut anywhere. From the first call on, rows wait
        for what the log tells of them. Raises TraceFileError for a log that cannot be read."""
        reader = self.listen_to_log()
        if self.raw is not None:
            self.raw.add_log(text)
        reader.feed(text)
        self._learn_from_log(reader)

    def log_ended(self) -> None:
        """The log is complete, its last line too."""
        if self._log is not None:
            self._log.end()
            self._learn_from_log(self._log)

    def listen_to_log(self) -> LogReader:
        """Rows wait for what the server's log tells of them, from now on."""
        if self._log is None:
            self._log = LogReader()
        return self._log

    def _learn_from_log(self, reader: LogReader) -> None:
        if reader.n_rs_seq is not None:
            self._reach.tell(reader.n_rs_seq)
        if reader.drafters:
            self._rows.drafters = reader.drafters
        self._rows.log_pieces = reader.pieces
        if reader.is_synthetic:
            self._writer.set_facts(synthetic=True)
        for answer in self._current:
            answer.join_log()

    def counters(self, before: str, after: str) -> None:
        """Replies of /metrics before and after, all requests being over; a difference from what
        was counted here becomes a finding. Raises ValueError for a text that is none."""
        if self.raw is not None:
            self.raw.metrics = before, after
        for answer in self._answers:
            answer.give_up_log()
        self.release(math.inf)
        moved = movement(read_counters(before), read_counters(after))
        if not all(one.is_last and one.told is not None for one in self._answers):
            return  # of some requests not even sums are known
        if all(one.has_rows for one in self._answers):
            counts = counted(self._writer.store, self.run_id)
            if len(self._answers) > len(self._requests):
                del counts[PROMPT]  # several answers to one prompt, which each of them counts
        else:
            told = [one.told for one in self._answers if one.told is not None]
            counts = {
                DRAFTED: sum(one.draft_n for one in told),
                ACCEPTED: sum(one.draft_n_accepted for one in told),
                PREDICTED: sum(one.predicted_n for one in told),
            }
        if found := differences(moved, counts):
            self.find(
                "counters-differ",
                "The server counted other sums than its replies told.",
                "; ".join(found),
            )

    def find(
        self,
        rule: str,
        message: str,
        evidence: str = "",
        *,
        seq_id: int | None = None,
        round: int | None = None,
    ) -> None:
        """Keep what was found while observing; the rule of that name shows it."""
        self._writer.facts["observed_findings"].append(
            {
                "rule": rule,
                "message": message,
                "evidence": evidence,
                "seq_id": seq_id,
                "round": round,
            }
        )

    def end(self, error: str | None = None) -> None:
        """Nothing more comes: settle what is open, end the run."""
        if self.ended:
            return
        for request in self._requests:
            if not request.is_over:
                request.broke(error or "The run was ended before the reply was complete.", math.inf)
        for answer in self._answers:
            answer.give_up_log()
        self.release(math.inf)
        stops = [answer.stop or "stopped" for answer in self._answers]
        told = [one.told for one in self._answers if one.told is not None]
        if told:
            has_rows = [one.has_rows for one in self._answers if one.told is not None]
            self._writer.set_facts(told=told_figures(told, any(has_rows), all(has_rows)))
        self._rows.fill_in()
        if self._rows.n_merged:
            self._writer.set_facts(merged_rows=self._rows.n_merged)
        if error is not None:
            self._writer.facts.setdefault("error", error)
        self._writer.end(stops)

    # -- what its requests call ---------------------------------------------------------------

    def keep(self, path: str, body: Mapping[str, Any], at_ms: float) -> RawRequest | None:
        """A request's place among what is kept, None without room."""
        if self.raw is None:
            return None
        return self.raw.request(path, body, len(json.dumps(body)), at_ms)

    def join(self, answer: _Answer) -> None:
        """A sequence more."""
        self._answers.append(answer)
        self._current.append(answer)
        self._writer.facts["requests"].append(answer.facts)

    def learn_drafters(self, types: str) -> None:
        """The server's drafters, as `speculative.types` names them."""
        named = [one for one in types.split(",") if one]
        self._writer.set_facts(speculative_types=named)
        if not self._rows.drafters:
            self._rows.drafters = [one for one in named if one != "none"]

    def new_join(self) -> LogJoin | None:
        """How an answer is joined with the log, None without one."""
        return LogJoin(self._log, self._in_log) if self._log is not None else None

    @property
    def has_room(self) -> bool:
        """Whether a trace can hold a request more."""
        return len(self._answers) + MOST_ANSWERS <= _MOST_SEQUENCES

    def leave_out(self) -> None:
        """A request is not recorded for want of room."""
        facts = self._writer.facts
        facts["requests_left_out"] = facts.get("requests_left_out", 0) + 1

    @property
    def drafters(self) -> list[str]:
        """The server's drafters, as far as known."""
        return self._rows.drafters

    @property
    def n_answers(self) -> int:
        """Sequences so far."""
        return len(self._answers)

    @property
    def reach(self) -> PlaneReach:
        """How deep the server's planes reach, as far as known."""
        return self._reach

    def ready(self, row: ReadyRow) -> None:
        """A row is settled; it is written once no earlier one can follow."""
        heapq.heappush(self._ready, (row.t_ms, row.seq_id, self._n_ready, row))
        self._n_ready += 1

    def release(self, at_ms: float) -> None:
        """Write the rows that nothing earlier can follow, or that waited long enough."""
        if math.isinf(at_ms):
            until = math.inf
        else:
            for one in self._current:
                if one.waits_since_ms < at_ms - self._patience_ms:
                    one.give_up_log()
            self._current = [one for one in self._current if not one.is_settled]
            open_ends = [one.next_ms for one in self._current if one.is_open]
            until = max(min(open_ends, default=math.inf), at_ms - self._patience_ms)
        while self._ready and self._ready[0][0] <= until:
            self._rows.write(heapq.heappop(self._ready)[3])


class _Answer:
    """One index of a reply: a sequence of the trace."""

    def __init__(
        self, run: ObservedRun, body: Mapping[str, Any], index: int, seq_id: int, sent_ms: float
    ) -> None:
        self._run, self._body, self._index, self._sent_ms = run, body, index, sent_ms
        self.seq_id = seq_id
        self.facts: dict[str, Any] = {}
        self.texts: list[str] = []
        self.stop = ""
        self.is_last = self.is_broken = False
        self._is_over = False
        self._is_whole = False
        self._rounds = StreamRounds(run.reach)
        self._zero_ms: float | None = None
        self._parts: list[tuple[int, float]] = []
        self._told: Timings | None = None
        self._n_untimed = 0
        self._n_written = 0
        self._over_ms = math.inf
        self._join: LogJoin | None = None
        self._is_apart = False

    @property
    def n_tokens(self) -> int:
        """Tokens that the server has counted."""
        return self._told.predicted_n if self._told else 0

    @property
    def is_open(self) -> bool:
        """Whether rows may follow that end before now."""
        begun = self._zero_ms is not None or bool(self._parts)
        return (begun and not (self._is_over or self.is_broken)) or self._is_waiting

    @property
    def is_settled(self) -> bool:
        """Whether no row of it can follow."""
        return self._is_over and not self._is_waiting

    @property
    def next_ms(self) -> float:
        """No row that follows ends before this time."""
        if self._zero_ms is None or self._told is None or not self._n_written:
            return self._sent_ms  # parts of the prompt end long before its first token
        name_ms = self._rounds.open_ms
        if self._join is not None and self._join.waiting:
            name_ms = min(name_ms, self._join.waiting[0].name_ms)
        return self._zero_ms + self._told.prompt_ms + name_ms

    @property
    def waits_since_ms(self) -> float:
        """When the answer was over, if rows of it still wait for the log."""
        return self._over_ms if self._is_waiting and self._is_over else math.inf

    @property
    def _is_waiting(self) -> bool:
        return self._join is not None and bool(self._join.waiting)

    def take(self, chunk: Chunk, at_ms: float) -> None:
        """A chunk of this answer. Raises ContradictionError."""
        if chunk.text:
            self.texts.append(chunk.text)
        if chunk.timings is None:
            self._n_untimed += bool(chunk.text)
            return
        if chunk.processed is not None:
            self._progress(chunk)
            return
        if chunk.last and self._zero_ms is None and (self._n_untimed or chunk.text):
            self._told = chunk.timings  # sums at the end: no rounds can be told
            self.facts["no_rounds"] = "The reply has no per-token timings."
            return
        if not chunk.timings.predicted_n:
            return
        if self._zero_ms is None:
            self._zero_ms = at_ms - chunk.timings.prompt_ms - chunk.timings.predicted_ms
        self._told = chunk.timings
        self._is_whole = chunk.last and _ends_whole(chunk.final, self._body, chunk.timings)
        self._push(self._rounds.add(chunk))

    def end(self, at_ms: float) -> None:
        """The answer is over. Raises ContradictionError."""
        if not self._is_over:
            self._is_over, self._over_ms = True, at_ms
            if self._told is not None:
                self.facts["told"] = told_figures([self._told], self.has_rows, self.has_rows)
            if not self.is_broken:
                self._push(self._rounds.end(is_whole=self._is_whole))
            join = self._run.new_join() if self._zero_ms is None else None
            if join is not None and self._told is not None:
                join.take_sums(self._told)

    def join_log(self) -> None:
        """The log may tell more of the rows that wait."""
        if self._join is None:
            return
        assert self._told is not None
        try:
            self._write(self._join.joined(self._told, is_over=self._is_over))
        except AnotherRunError as error:
            self._keep_apart(f"{error}")

    def give_up_log(self) -> None:
        """The log tells nothing of the rows that wait."""
        if self._join is None or not self._join.waiting:
            return
        what = "ended before this request did" if self._join.is_found else "has no such request"
        self._keep_apart(f"the log {what}")

    def _keep_apart(self, why: str) -> None:
        assert self._join is not None
        join, self._join, self._is_apart = self._join, None, True
        self._run.find(
            "log-of-another-run",
            f"The log was not joined to sequence {self.seq_id}: {why}.",
            seq_id=self.seq_id,
        )
        self._write(join.give_up())

    @property
    def told(self) -> Timings | None:
        """The server's own counters as they were told last."""
        return self._told

    @property
    def has_rows(self) -> bool:
        """Whether rounds were told, and not only sums."""
        return self._zero_ms is not None and not self.is_broken

    def _progress(self, chunk: Chunk) -> None:
        assert chunk.timings is not None
        assert chunk.processed is not None
        if len(self._parts) < _LONGEST_TEXT:
            self._parts.append((chunk.processed, chunk.timings.prompt_ms))

    def _push(self, rounds: list[ObservedRound]) -> None:
        if self._join is None and not self._is_apart and rounds and rounds[0].first == 1:
            self._join = self._run.new_join()
        if self._join is None:
            self._write(rounds)
        else:
            self._join.add(rounds)
            self.join_log()

    def _write(self, rounds: Iterable[ObservedRound]) -> None:
        told, zero = self._told, self._zero_ms
        if told is None or zero is None:
            return
        n_prompt = told.cache_n + told.prompt_n
        for one in rounds:
            self._n_written += 1
            if one.first == 1:
                self._push_prompt(one, told, zero)
                continue
            t_ms = zero + told.prompt_ms + one.name_ms
            self._run.ready(ReadyRow(t_ms, self.seq_id, n_prompt, one))

    def _push_prompt(self, first: ObservedRound, told: Timings, zero: float) -> None:
        n_prompt, ids = told.cache_n + told.prompt_n, self._prompt_ids()
        if len(ids) != n_prompt:
            ids = ()
        at, before_ms = told.cache_n, 0.0
        for processed, prompt_ms in [*self._parts, (n_prompt, told.prompt_ms)]:
            is_last = processed == n_prompt and prompt_ms == told.prompt_ms
            if not at < processed <= n_prompt and not is_last:
                continue
            if processed == n_prompt and not is_last:
                continue  # the last part: its time comes with the first token
            if not before_ms <= prompt_ms <= told.prompt_ms:
                continue
            part = PromptPart(at, processed - at, prompt_ms, before_ms)
            row = ReadyRow(
                zero + prompt_ms, self.seq_id, n_prompt, first if is_last else None, part, ids
            )
            self._run.ready(row)
            at, before_ms, ids = processed, prompt_ms, ()

    def _prompt_ids(self) -> tuple[int, ...]:
        """Ids of the prompt where it was sent as such, or as a text that the vocabulary knows."""
        prompt = self._body.get("prompt")
        if isinstance(prompt, str) and self._run.vocabulary is not None:
            return tuple(self._run.vocabulary.encode(prompt))
        if not isinstance(prompt, list) or not prompt:
            return ()
        if isinstance(prompt[0], list) and self._index < len(prompt):
            prompt = prompt[self._index]
        is_ids = all(isinstance(t, int) and 0 <= t < 2**31 for t in prompt)
        return tuple(prompt) if isinstance(prompt, list) and is_ids else ()


def _with_derived_ids(columns: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return columns | {"tokens": columns["tokens"] | {"token_id": "derived"}}


def _ends_whole(final: Mapping[str, Any], body: Mapping[str, Any], told: Timings) -> bool:
    """Whether the last round was not cut: the number of tokens asked for never cuts one."""
    if final.get("truncated"):
        return False
    if "stop_type" in final:
        return bool(final["stop_type"] == "limit")
    names = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")
    return any(body.get(name) == told.predicted_n for name in names)


def _stop(final: Mapping[str, Any]) -> str:
    """Why an answer ended, in the trace's words where it has one."""
    if final.get("truncated") is True:
        return "context"
    told = final.get("stop_type") or final.get("finish_reason") or final.get("stop_reason")
    names = {"eos": "end", "length": "limit", "max_tokens": "limit", "none": "stopped"}
    if not isinstance(told, str):
        return "limit" if final.get("status") == "incomplete" else "end"
    return names.get(told, told[:100])


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request asked for, without its text."""
    left_out = ("prompt", "messages", "input", "input_prefix", "input_suffix", "tools")
    found = {str(k)[:100]: as_fact(v) for k, v in body.items() if k not in left_out}
    return found | ({"tools": len(tools)} if isinstance(tools := body.get("tools"), list) else {})


def _prompt_text(body: Mapping[str, Any]) -> str | None:
    prompt = body.get("prompt", body.get("input"))
    return prompt[:_LONGEST_TEXT] if isinstance(prompt, str) else None


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Role and text of a chat's messages."""
    messages, room = body.get("messages"), _LONGEST_TEXT
    found = []
    for one in messages if isinstance(messages, list) else ():
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (0, 0)
        if not isinstance(role, str) or not isinstance(content, str) or len(content) > room:
            return []
        room -= len(content)
        found.append({"role": role[:100], "content": content})
    return found


def as_fact(value: Any) -> Any:
    """A value as a fact may hold it: scalars, and lists and objects of them that are not long."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, dict):
        return {str(k)[:100]: _inner_fact(v) for k, v in list(value.items())[:200]}
    if isinstance(value, list):
        return [_inner_fact(v) for v in value[:1000]]
    return value if isinstance(value, (int, float, bool)) else None


def _inner_fact(value: Any) -> Any:
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, list):
        return [_plain_item(v) for v in value[:100]]
    return value if isinstance(value, (int, float, bool)) else None


def _plain_item(value: Any) -> Any:
    """An entry of a list of settings, such as a token and its bias."""
    if isinstance(value, list):
        return [_plain_item(v) for v in value[:2] if not isinstance(v, (list, dict))]
    if isinstance(value, dict):
        return {str(k)[:100]: v for k, v in list(value.items())[:8] if isinstance(v, (int, float))}
    return value[:1000] if isinstance(value, str) else _inner_fact(value)


def _server(server: ServerFacts) -> dict[str, Any]:
    address = urlsplit(server.address) if "//" in server.address else None
    shown = server.address
    if address is not None:
        shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
    props = server.props
    found = {"address": shown, "build_info": as_fact(props.get("build_info"))}
    for name in ("total_slots", "model_alias", "n_ctx"):
        if name in props:
            found[name] = as_fact(props[name])
    defaults = props.get("default_generation_settings")
    if isinstance(defaults, dict) and isinstance(defaults.get("n_ctx"), int):
        found["n_ctx"] = defaults["n_ctx"]
    return found


def _model(server: ServerFacts) -> dict[str, Any] | None:
    """The model by its file's name and what /v1/models tells of it."""
    data = server.models.get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    path = server.props.get("model_path") or first.get("id")
    if not isinstance(path, str):
        return None
    meta = first.get("meta")
    return {"name": file_name(path), "meta": as_fact(meta) if isinstance(meta, dict) else {}}
