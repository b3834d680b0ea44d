"""Answers of replies: chunks in, rows out once they are settled."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from engine.foreign import are_whole
from engine.observe.rounds.counters import Movement
from engine.observe.rounds.kept_requests import LONGEST_TEXT, RawStore
from engine.observe.rounds.log_prompts import LoggedPrompt
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.stream import MOST_ANSWERS, Chunk, Timings, UnreadableError, Usage
from engine.observe.rounds.stream_and_log import AnotherRunError, LogJoin
from engine.observe.rounds.stream_rounds import Addition, ObservedRound, StreamRounds
from engine.observe.rounds.trace_rows import (
    PromptPart,
    ReadyRow,
    RowWriter,
    TokenColumns,
    told_figures,
)
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.gguf.tokenizer import Tokenizer

_MOST_PARTS = 1 << 16
_END = 64
"""Characters used to recognise the end of a text."""
_MOST_EVENTS = 1 << 20
_MOST_SEQUENCES = 1 << 16
MOST_TEXT = 1 << 28
"""Longest answer, characters; a server must not fill the memory."""


class PlainRecord(Protocol):
    """A reply without timings, see engine.observe.files.records.request.RecordedRequest."""

    engine: str
    record: dict[str, Any]
    contradictions: list[tuple[tuple[str, ...], str]]

    def figures(self) -> dict[str, Any]: ...


class PlainReader(Protocol):
    """Reads other engines' speculation data; implemented in `engine.observe.files.records`, which
    knows their formats."""

    def answers(
        self, tokens: Mapping[int, EmittedTokens], events: Sequence[Mapping[str, Any]]
    ) -> Iterable[PlainRecord]:
        """The known data of each answer of a reply. events: those that may contain counts."""

    def figures(self, records: Sequence[Any], moved: Movement | None) -> dict[str, Any]:
        """Figures over several such answers, and from the server's counters if the answers have
        none."""


class EmittedTokens:
    """The tokens of an answer, from events without rounds.

    prompt_ids: empty if not given. n_prompt, n_tokens: as counted in the reply, None if absent.
    times: see `Usage`.
    """

    def __init__(self) -> None:
        self.prompt_ids: tuple[int, ...] = ()
        self.n_prompt: int | None = None
        self.n_cached: int | None = None
        self.n_tokens: int | None = None
        self.times: dict[str, float] = {}
        self.events: list[tuple[tuple[int, ...], str]] = []
        """Ids and text of each event that has any."""
        self.n_ids = 0
        self._pieces: list[str] = []
        self._n_text = 0
        self._end = ""
        self._has_gap = False

    @property
    def text(self) -> str:
        """The beginning of the text, up to the trace's limit."""
        return "".join(text for _, text in self.events)[:LONGEST_TEXT]

    def take(self, chunk: Chunk) -> str:
        """Add an event; returns its text."""
        if chunk.additions:
            return self._add([(one.tokens, one.content) for one in chunk.additions])
        ids, text = chunk.ids, chunk.text
        if chunk.is_whole:  # cumulative or incremental: engines differ
            n, end = self._n_text, self._end
            if n and text[max(n - len(end), 0) : n] == end:
                text = text[n:]
            last = self.events[-1][0][-1:] if self.events else ()
            if self.n_ids and ids[: self.n_ids][-1:] == last and len(ids) >= self.n_ids:
                ids = ids[self.n_ids :]
        if chunk.usage is not None:
            self.count(chunk.usage)
        self.prompt_ids = self.prompt_ids or chunk.prompt_ids
        self._pieces += chunk.pieces if self.n_ids == 0 and not ids else ()
        if ids or text:
            self._add([(ids, text)])
        if chunk.count is not None and not chunk.last and chunk.count != self.n_ids:
            self._has_gap = True  # tokens without an event of their own
        return text

    def _add(self, events: list[tuple[tuple[int, ...], str]]) -> str:
        """Add ids and texts of events up to the limit; returns the added text."""
        text = "".join(text for _, text in events)
        self.n_ids += sum(len(ids) for ids, _ in events)
        self._n_text += len(text)
        self._end = (self._end + text)[-_END:]
        room = _MOST_EVENTS - len(self.events)
        if not self._has_gap:
            self.events += events[:room]
        self._has_gap |= len(events) > room
        return text

    def count(self, usage: Usage) -> None:
        """Set the number of tokens. The last count is that of the whole answer."""
        self.n_prompt = usage.prompt if usage.prompt is not None else self.n_prompt
        self.n_cached = usage.cached if usage.cached is not None else self.n_cached
        self.n_tokens = usage.completion if usage.completion is not None else self.n_tokens
        self.times |= usage.times

    def tokens(self, n: int | None) -> TokenColumns:
        """The tokens with their ids, and texts where an event is a single token. Without ids, the
        texts of tokens if events or probabilities correspond to tokens; otherwise nothing, because
        a text can be tokenised in many ways. n: number of tokens, None if unknown."""
        if self._has_gap:
            return (), ()
        if self.n_ids:
            every = [ids for ids, _ in self.events]
            ids = every[0] if len(every) == 1 else [*chain.from_iterable(every)]
            if not any(len(ids) == 1 for ids in every):
                return ids, ()
            each = [(text,) if len(ids) == 1 else (None,) * len(ids) for ids, text in self.events]
            return ids, [*chain.from_iterable(each)]
        texts = [text for _, text in self.events if text]
        if self._pieces and len(self._pieces) == n and "".join(self._pieces) == "".join(texts):
            texts = self._pieces
        if not n or len(texts) != n:
            return (), ()
        return [None] * n, texts


class Answer:
    """One index of a reply, which is a sequence of the trace."""

    def __init__(
        self, run: RequestRun, body: Mapping[str, Any], index: int, seq_id: int, sent_ms: float
    ) -> None:
        self._run, self._body, self._index, self._sent_ms = run, body, index, sent_ms
        self.seq_id = seq_id
        self.known: dict[str, Any] = {}
        self.texts: list[str] = []
        self.stop = ""
        self.is_last = self.is_broken = False
        self._is_over = False
        self._is_whole = False
        self._rounds = StreamRounds(run.reach)
        self._zero_ms: float | None = None
        self._parts: list[tuple[int, float]] = []
        self.told: Timings | None = None
        """The server's latest counters."""
        self._n_untimed = self._n_text = 0
        self.emitted = EmittedTokens()
        """Its tokens that belong to no known round."""
        self.record: PlainRecord | None = None
        """The data of a reply without timings."""
        self._n_written = 0
        self._over_ms = math.inf
        self._join: LogJoin | None = None
        self._sums: LogJoin | None = None
        self._is_apart = False

    @property
    def n_tokens(self) -> int:
        """Tokens counted by the server."""
        return self.told.predicted_n if self.told else 0

    @property
    def is_open(self) -> bool:
        """Whether rows that end before the present may follow."""
        begun = self._zero_ms is not None or bool(self._parts)
        return (begun and not (self._is_over or self.is_broken)) or self._is_waiting

    @property
    def is_settled(self) -> bool:
        """Whether no further row can follow."""
        return self._is_over and not self._is_waiting

    @property
    def next_ms(self) -> float:
        """Earliest possible end of a further row."""
        if self._zero_ms is None or self.told is None or not self._n_written:
            return self._sent_ms  # parts of the prompt end long before its first token
        name_ms = self._rounds.open_ms
        if self._join is not None and self._join.waiting:
            name_ms = min(name_ms, self._join.waiting[0].name_ms)
        return self._zero_ms + self.told.prompt_ms + name_ms

    @property
    def waits_since_ms(self) -> float:
        """When the answer ended, if rows of it still wait for the log."""
        return self._over_ms if self._is_waiting and self._is_over else math.inf

    @property
    def _is_waiting(self) -> bool:
        return self._join is not None and bool(self._join.waiting)

    def take(self, chunk: Chunk, at_ms: float) -> None:
        """Add a chunk of this answer. Raises ContradictionError, and UnreadableError above the
        limits."""
        if chunk.additions and chunk.timings is not None:
            self._take_rounds(chunk.additions, at_ms)
            return
        if self._zero_ms is None:
            text = self.emitted.take(chunk)
        else:
            text = chunk.text or "".join(one.text for one in chunk.additions)
        if text:
            self._add_texts([text])
        if chunk.timings is None:
            self._n_untimed += bool(text)
            return
        if chunk.processed is not None:
            if len(self._parts) < _MOST_PARTS:
                self._parts.append((chunk.processed, chunk.timings.prompt_ms))
            return
        is_sum = self._n_untimed or text or chunk.timings.predicted_n > 1
        if chunk.last and self._zero_ms is None and is_sum:
            self.told = chunk.timings  # only sums at the end: rounds are unknown
            self.known["no_rounds"] = "The reply has no per-token timings."
            return
        if not chunk.timings.predicted_n:
            return
        if self._zero_ms is None:
            self._zero_ms = at_ms - chunk.timings.prompt_ms - chunk.timings.predicted_ms
        self.told = chunk.timings
        self._is_whole = chunk.last and _ends_whole(chunk.final, self._body, chunk.timings)
        self._push(self._rounds.add(chunk))

    def _take_rounds(self, additions: Sequence[Addition], at_ms: float) -> None:
        """Chunks with timings: usual ones a round at once, others like any chunk."""
        at = 0
        while at < len(additions):
            begin, (at, rounds) = at, self._rounds.go_on(additions, at)
            if at == begin:
                self.take(additions[at].chunk, at_ms)
                at += 1
                continue
            self._add_texts([one.content for one in additions[begin:at]])
            self.told, self._is_whole = additions[at - 1].timings, False
            if rounds:
                self._push(rounds)

    def _add_texts(self, texts: list[str]) -> None:
        self._n_text += sum(map(len, texts))
        if self._n_text > MOST_TEXT:
            raise UnreadableError(f"sent more than {MOST_TEXT:,} characters for one prompt")
        self.texts += texts

    def end(self, at_ms: float) -> None:
        """End the answer. Raises ContradictionError."""
        if not self._is_over:
            self._is_over, self._over_ms = True, at_ms
            if self.told is not None:
                self.known["told"] = told_figures([self.told], self.has_rows, self.has_rows)
            if not self.is_broken:
                self._push(self._rounds.end(is_whole=self._is_whole))
            if self._zero_ms is None:
                self._write_emitted(at_ms)
            join = self._run.new_join() if self._zero_ms is None else None
            if join is not None and self.told is not None:
                join.take_sums(self.told)
                self._sums = join
            self.emitted = EmittedTokens()  # they are in the trace

    @property
    def logged_prompt(self) -> LoggedPrompt | None:
        """The prompt's data in the server's log."""
        join = self._join or self._sums
        return join.prompt if join is not None else None

    def _write_emitted(self, at_ms: float) -> None:
        """Write the tokens of a reply without rounds."""
        n_prompt, n = self.emitted.n_prompt, self.emitted.n_tokens
        if self.told is not None:
            n_prompt, n = self.told.cache_n + self.told.prompt_n, self.told.predicted_n
        tokens = self.emitted.tokens(n)
        if None in tokens[1] or not tokens[1]:
            self.known["text"] = self.emitted.text
        if not tokens[0]:
            return
        ids = self.emitted.prompt_ids or self._prompt_ids()
        if n_prompt is not None and len(ids) != n_prompt:
            ids = ()
        n_prompt = len(ids) if n_prompt is None else n_prompt
        row = ReadyRow(at_ms, self.seq_id, n_prompt, prompt_ids=ids, emitted=tokens)
        self._run.ready(row)

    def join_log(self) -> None:
        """Complete waiting rows from new log lines."""
        if self._join is None:
            return
        assert self.told is not None
        try:
            self._write(self._join.joined(self.told, is_over=self._is_over))
        except AnotherRunError as error:
            self._keep_apart(f"{error}")

    def give_up_log(self) -> None:
        """Stop waiting for the log."""
        if self._join is None or not self._join.waiting:
            return
        what = "ended before this request did" if self._join.is_found else "has no such request"
        self._keep_apart(f"the log {what}")

    def _keep_apart(self, why: str) -> None:
        assert self._join is not None
        join, self._join, self._is_apart = self._join, None, True
        self._run.find(
            "log-of-another-run",
            f"The log was not merged with sequence {self.seq_id}: {why}.",
            seq_id=self.seq_id,
        )
        self._write(join.give_up())

    @property
    def has_rows(self) -> bool:
        """Whether rounds are known, not only sums."""
        return self._zero_ms is not None and not self.is_broken

    def _push(self, rounds: list[ObservedRound]) -> None:
        if self._join is None and not self._is_apart and rounds and rounds[0].first == 1:
            self._join = self._run.new_join()
        if self._join is None:
            self._write(rounds)
        else:
            self._join.waiting += rounds
            self.join_log()

    def _write(self, rounds: Iterable[ObservedRound]) -> None:
        told, zero = self.told, self._zero_ms
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
        """Prompt ids, if they were sent, or if the text can be tokenised."""
        prompt = self._body.get("prompt")
        if isinstance(prompt, str) and self._run.vocabulary is not None:
            return tuple(self._run.vocabulary.encode(prompt))
        if not isinstance(prompt, list) or not prompt:
            return ()
        if isinstance(prompt[0], list) and self._index < len(prompt):
            prompt = prompt[self._index]
        return tuple(prompt) if isinstance(prompt, list) and are_whole(prompt) else ()


class RequestRun:
    """The run of an observed server, from its requests' side: what is kept of them, rows in the
    order in which rounds ended, findings. raw: unparsed data that is kept, None for nothing. plain:
    reads replies without timings, None = not at all. reach: depth of the server's planes, as far as
    known. patience_ms: see `ObservedRun`."""

    def __init__(
        self,
        writer: TraceWriter,
        reach: PlaneReach,
        raw: RawStore | None,
        plain: PlainReader | None,
        vocabulary: Tokenizer | None,
        patience_ms: float,
    ) -> None:
        self.reach, self.raw, self.plain, self.vocabulary = reach, raw, plain, vocabulary
        self._writer, self._rows = writer, RowWriter(writer, reach, vocabulary)
        self._patience_ms = patience_ms
        self._answers: list[Answer] = []
        self._current: list[Answer] = []
        self._ready: list[tuple[float, int, int, ReadyRow]] = []
        self._released = deque[ReadyRow]()
        self._n_ready = self._n_looks_left = 0
        self._log: LogReader | None = None
        self._in_log: set[int] = set()

    def join(self, answer: Answer) -> None:
        """Add a sequence."""
        self._answers.append(answer)
        self._current.append(answer)
        self._writer.facts.add_to("requests", answer.known)

    def learn_drafters(self, types: str) -> None:
        """Note the server's drafters, from `speculative.types`."""
        named = [one for one in types.split(",") if one]
        self._writer.set_facts(speculative_types=named)
        if not self._rows.drafters:
            self._rows.drafters = [one for one in named if one != "none"]

    def new_join(self) -> LogJoin | None:
        """The join of an answer with the log, None without one."""
        return LogJoin(self._log, self._in_log) if self._log is not None else None

    @property
    def has_room(self) -> bool:
        """Whether the trace can hold another request."""
        return len(self._answers) + MOST_ANSWERS <= _MOST_SEQUENCES

    def leave_out(self) -> None:
        """Count a request that is not recorded for lack of space."""
        n = self._writer.facts.requests_left_out or 0
        self._writer.set_facts(requests_left_out=n + 1)

    @property
    def n_answers(self) -> int:
        """Number of sequences so far."""
        return len(self._answers)

    def ready(self, row: ReadyRow) -> None:
        """Add a settled row; it is written once no earlier one can follow."""
        assert row.t_ms is not None
        heapq.heappush(self._ready, (row.t_ms, row.seq_id, self._n_ready, row))
        self._n_ready += 1

    def release(self, at_ms: float) -> None:
        """Write rows that nothing earlier can follow, or that have waited long enough."""
        self._n_looks_left -= 1
        if self._n_looks_left > 0 and math.isfinite(at_ms):
            return  # checking all open answers is too slow for every piece
        self._n_looks_left = len(self._current) // 8
        until = math.inf
        if math.isfinite(at_ms):
            for one in self._current:
                if one.waits_since_ms < at_ms - self._patience_ms:
                    one.give_up_log()
            self._current = [one for one in self._current if not one.is_settled]
            open_ends = [one.next_ms for one in self._current if one.is_open]
            until = max(min(open_ends, default=math.inf), at_ms - self._patience_ms)
        while self._ready and self._ready[0][0] <= until:
            self._released.append(heapq.heappop(self._ready)[3])
        # until then a file's rounds wait for everything learned about its server
        is_early = math.isinf(self._patience_ms) and math.isfinite(at_ms)
        while self._released and (self._released[0].emitted[0] or not is_early):
            self._rows.write(self._released.popleft())
        if not is_early:
            self._rows.flush()

    def find(self, rule: str, message: str, evidence: str = "", seq_id: int | None = None) -> None:
        """Add a finding made while observing, shown by the rule of that name."""
        found = {"rule": rule, "message": message, "evidence": evidence}
        self._writer.facts.add_to("observed_findings", found | {"seq_id": seq_id, "round": None})


def _ends_whole(final: Mapping[str, Any], body: Mapping[str, Any], told: Timings) -> bool:
    """Whether the last round was complete: a stop condition other than the token limit may cut
    it."""
    if final.get("truncated"):
        return False
    if "stop_type" in final:
        return bool(final["stop_type"] == "limit")
    names = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")
    return any(body.get(name) == told.predicted_n for name in names)
