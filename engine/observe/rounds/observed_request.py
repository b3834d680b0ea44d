"""One observed request and its reply, whose events are parsed from bytes cut anywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any

from engine.foreign import is_whole
from engine.observe.rounds.answer import Answer, RequestRun
from engine.observe.rounds.kept_requests import as_fact, asked_facts, n_answers_asked, stop_of
from engine.observe.rounds.stream import Chunk, Timings, UnreadableError, chunks, read_json
from engine.observe.rounds.stream_rounds import ContradictionError, additions

MOST_LINE_BYTES = 16 << 20
"""Longer lines, or longer replies in one piece, are not read."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MOST_COUNTING = 16
_NO_DATA = (b"", b"[DONE]", b"null")
_FEWEST = 2
"""Up to this many events are parsed individually: none is between two others."""


class EventReader:
    """A stream of server-sent events or of JSON lines, or a JSON reply in one piece.

    n_events: complete events with data; neither comments nor pings count.
    """

    def __init__(self, content_type: str = "") -> None:
        """content_type: of the reply; if empty, the first bytes decide."""
        self.n_events = 0
        self._parts: list[bytes] = []
        self._n_rest = self._n_event = 0
        self._data: list[bytes] = []
        self._is_stream: bool | None = None
        self._is_lines = "ndjson" in content_type or "jsonl" in content_type
        if "event-stream" in content_type or self._is_lines:
            self._is_stream = True
        elif "json" in content_type:
            self._is_stream = False

    def feed(self, piece: bytes) -> Iterator[Chunk]:
        """The chunks completed by these bytes. Raises UnreadableError, after yielding those before
        it."""
        if self._is_stream is None and (start := piece.lstrip()):
            self._is_stream = not start.startswith((b"{", b"["))
        is_held = bool(self._parts) and self._parts[-1].endswith(b"\r")
        self._parts.append(piece)
        self._n_rest += len(piece)
        if self._is_stream is False or not (is_held or b"\n" in piece or b"\r" in piece):
            if self._n_rest > MOST_LINE_BYTES:
                what = "a line" if self._is_stream else "a reply"
                raise UnreadableError(f"sent {what} of more than {MOST_LINE_BYTES >> 20} MiB")
            return
        data = b"".join(self._parts)
        held = data.endswith(b"\r")  # its "\n" may come with the next piece
        if b"\r" in data:
            data = _LINE_END.sub(b"\n", data[:-1] if held else data)
        begin, _, rest = data.rpartition(b"\n")
        rest += b"\r" if held else b""
        self._parts, self._n_rest = [rest], len(rest)
        events: list[bytes] = []
        try:
            if self._is_lines:
                events += filter(bytes.strip, begin.split(b"\n"))
                self.n_events += len(events)
            else:
                *blocks, lines = (begin + b"\n").split(b"\n\n")
                for block in blocks:  # nearly always a line with data
                    is_one = block[:7] == b"data: {" and b"\n" not in block and not self._data
                    if is_one and len(block) <= MOST_LINE_BYTES:
                        self.n_events, self._n_event = self.n_events + 1, 0
                        events.append(block[6:])
                    else:
                        events += self._fields(block)
                        events += self._event()
                events += self._fields(lines[:-1]) if lines else ()
        except UnreadableError:
            yield from _chunks(events)
            raise
        yield from _chunks(events)
        if len(rest) > MOST_LINE_BYTES:
            raise UnreadableError(f"sent a line of more than {MOST_LINE_BYTES >> 20} MiB")

    def end(self) -> Iterator[Chunk]:
        """End of the reply: the chunks of the last bytes, if complete."""
        data = b"".join(self._parts)
        self._parts, self._n_rest = [], 0
        if self._is_stream is False:
            if data.strip():
                yield from chunks(read_json(data))
        elif self._is_lines:
            self.n_events += bool(data.strip())
            yield from _chunks([data] if data.strip() else [])
        elif data == b"\r":
            yield from _chunks(self._event())

    def _fields(self, lines: bytes) -> Iterator[bytes]:
        """Data of lines of which the last is not blank."""
        for line in lines.split(b"\n"):
            if line:
                self._field(line if self.n_events else line.removeprefix(b"\xef\xbb\xbf"))
            else:
                yield from self._event()

    def _field(self, line: bytes) -> None:
        """Add a line of an event. Only data fields matter (HTML standard, 9.2.6)."""
        self._n_event += len(line)
        if self._n_event > MOST_LINE_BYTES:
            raise UnreadableError(f"sent an event of more than {MOST_LINE_BYTES >> 20} MiB")
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> list[bytes]:
        """A blank line ends an event. Returns its data, if any."""
        data, self._data, self._n_event = self._data, [], 0
        self.n_events += bool(data)
        text = b"\n".join(data)
        return [] if text.strip() in _NO_DATA else [text]


def _chunks(events: Sequence[bytes]) -> Iterator[Chunk]:
    """The chunks of a stream's events, in sequence. Raises UnreadableError."""
    texts = [event.decode("utf-8", "replace") for event in events]
    of_each = additions(texts) if len(texts) > _FEWEST else zip(texts, repeat(None))
    for is_addition, some in groupby(of_each, lambda one: one[1] is not None):
        if is_addition:
            yield from chunks(tuple(one for _, one in some))
        else:
            yield from chain.from_iterable(chunks(read_json(text)) for text, _ in some)


class ObservedRequest:
    """One request of a run: one sequence, or several for several prompts.

    Times are milliseconds since the run began, on this machine's clock.
    """

    def __init__(
        self, run: RequestRun, number: int, path: str, body: Mapping[str, Any], at_ms: float
    ) -> None:
        self._run, self._body, self._sent_ms = run, body, at_ms
        self._raw = run.raw.request(path, body, at_ms) if run.raw is not None else None
        self._reader = EventReader()
        self._status: int | None = None
        self.is_over = False
        """Whether the reply has ended, or is no longer read."""
        self._answers: list[Answer] = []
        self._counting: list[Mapping[str, Any]] = []
        """Events that may contain another engine's counts."""
        self.known: dict[str, Any] = {
            "number": number,
            "path": path,
            "sent_ms": at_ms,
            "complete": False,
            **asked_facts(body),
        }
        if isinstance(model := body.get("model"), str):
            self.known["model"] = model[:1000]
        if run.has_room:
            self._answer(0)
        else:
            self.is_over = True
            run.leave_out()

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Its sequences in the trace, by index of the reply."""
        return tuple(answer.seq_id for answer in self._answers)

    @property
    def text(self) -> str:
        """The text generated so far."""
        return "\n".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """The same for each answer, as `seq_ids`."""
        return tuple("".join(answer.texts) for answer in self._answers)

    @property
    def first_texts(self) -> Sequence[str]:
        """The pieces of the first answer; the list grows."""
        return self._answers[0].texts if self._answers else ()

    @property
    def told(self) -> tuple[Timings | None, ...]:
        """The server's latest counters, by index of the reply."""
        return tuple(answer.told for answer in self._answers)

    @property
    def n_events(self) -> int:
        """Complete events."""
        return self._reader.n_events

    @property
    def is_complete(self) -> bool:
        """Whether every requested answer has had its last event."""
        n_last = sum(answer.is_last for answer in self._answers)
        return n_last >= max(len(self._answers), n_answers_asked(self._body))

    def head(self, status: int, headers: Mapping[str, str], at_ms: float) -> None:
        """Start of the reply. headers: of the reply."""
        kinds = [value for name, value in headers.items() if name.lower() == "content-type"]
        self._reader = EventReader(kinds[0] if kinds else "")
        self._status = status
        self.learn(status=status)
        if self._raw is not None:
            self._raw.status, self._raw.head_ms = status, at_ms
            self._raw.content_type = kinds[0] if kinds else ""

    def data(self, piece: bytes, at_ms: float) -> None:
        """Add a piece of the reply's body, cut anywhere. Never raises for server data."""
        if self.is_over:
            return
        if self._raw is not None and self._run.raw is not None:
            self._run.raw.data(self._raw, piece, at_ms)
        self._take_all(self._reader.feed(piece), at_ms)
        self._run.release(at_ms)

    def events(self, events: Iterable[Any], at_ms: float) -> None:
        """Add events of the reply that were parsed before. Never raises for server data."""
        if not self.is_over:
            self._take_all(chain.from_iterable(map(chunks, events)), at_ms)

    def _take_all(self, read: Iterable[Chunk], at_ms: float) -> bool:
        """False if the server sent something unreadable."""
        try:
            for chunk in read:
                self._take(chunk, at_ms)
        except UnreadableError as error:
            self._refuse("stream-unreadable", f"The server {error}", at_ms)
            return False
        return True

    def done(self, at_ms: float) -> None:
        """The reply ended normally."""
        if self.is_over or not self._take_all(self._reader.end(), at_ms):
            return
        if self._status is not None and self._status >= 400:
            self._fail(f"The server answered {self._status}.")
        elif not self._cut(
            self.known.get("error", "The reply ended before the answer was complete.")
        ):
            self.learn(complete="error" not in self.known)
        self._end(at_ms)

    def broke(self, reason: str, at_ms: float) -> None:
        """The reply was cut short. reason: one sentence for the user."""
        if self.is_over:
            return
        if self._raw is not None:
            self._raw.broke = reason
        if not self._cut(reason):
            self.learn(complete=True)
        self._end(at_ms)

    def left(self, at_ms: float) -> None:
        """The client left, or the request was ended here: not the server's fault."""
        if self.is_over:
            return
        if self._raw is not None:
            self._raw.has_left = True
        for answer in self._answers:
            answer.stop = answer.stop or "stopped"
        self._end(at_ms)

    def learn(self, **facts: Any) -> None:
        """Add facts of the request to each of its sequences."""
        self.known.update(facts)
        for answer in self._answers:
            answer.known.update(facts)

    def _fail(self, error: str) -> None:
        """Note an error; the first one counts."""
        if "error" not in self.known:
            self.learn(error=error)

    def _cut(self, reason: str) -> bool:
        """If answers are incomplete, note the reason; returns whether they were."""
        cut = [one for one in self._answers if not (one.is_last or one.is_broken)]
        if cut:
            self._fail(reason)
        for answer in cut:
            answer.stop = answer.stop or "lost"
            had = f"{answer.n_tokens} tokens had arrived"
            self._run.find("stream-cut", f"{reason.rstrip('.')}.", had, seq_id=answer.seq_id)
        return bool(cut)

    def _end(self, at_ms: float) -> None:
        self.is_over = True
        if self._raw is not None and math.isfinite(at_ms):
            self._raw.done_ms = at_ms
        self._count()
        for answer in self._answers:
            try:
                answer.end(at_ms)
            except ContradictionError as error:
                self._contradicts(answer, error)
        self._run.release(at_ms)

    def _count(self) -> None:
        """Read tokens and speculation counts of a reply without timings."""
        plain, answers = self._run.plain, self._answers
        if plain is None or any(one.told is not None for one in answers):
            return
        tokens = {index: answer.emitted for index, answer in enumerate(answers)}
        found = plain.answers(tokens, self._counting)
        self._counting = []
        for answer, request in zip(answers, found, strict=True):
            if request.engine:
                answer.known["engine"] = request.engine
            answer.record = request
            answer.known.update(told=request.figures(), record=request.record)
            for keys, sentence in request.contradictions:
                self._run.find(
                    "counters-contradict",
                    f"The counts contradict each other, so these figures are left out: {sentence}.",
                    ", ".join(keys),
                    seq_id=answer.seq_id,
                )

    def _answer(self, index: int) -> Answer:
        for number in range(len(self._answers), index + 1):
            answer = Answer(self._run, self._body, number, self._run.n_answers, self._sent_ms)
            answer.known.update(self.known, index=number, seq_ids=[answer.seq_id])
            self._run.join(answer)
            self._answers.append(answer)
        return self._answers[index]

    def _take(self, chunk: Chunk, at_ms: float) -> None:
        if chunk.error:
            self._fail(f"The server reported: {chunk.error}")
            for answer in self._answers:
                answer.stop = answer.stop or "error"
            return
        if chunk.index >= len(self._answers) and not self._run.has_room:
            return
        answer = self._answer(chunk.index)
        if answer.is_broken:
            return
        if chunk.timings is None and (chunk.last or chunk.usage is not None):
            self._counting = [*self._counting[1 - _MOST_COUNTING :], chunk.event]
        try:
            answer.take(chunk, at_ms)
        except ContradictionError as error:
            self._contradicts(answer, error)
        if chunk.last:
            self._learn_final(answer, chunk)

    def _contradicts(self, answer: Answer, error: ContradictionError) -> None:
        answer.is_broken, answer.stop = True, answer.stop or "failed"
        self._run.find(
            "counters-contradict",
            f"The counters of sequence {answer.seq_id} contradict each other: {error}.",
            f"after token {answer.n_tokens}; nothing after it is shown",
            seq_id=answer.seq_id,
        )

    def _refuse(self, rule: str, message: str, at_ms: float) -> None:
        """Stop reading the reply; what came before stays."""
        self._fail(f"{message}.")
        for answer in self._answers:
            if not answer.is_last:
                answer.stop = answer.stop or "failed"
                self._run.find(
                    rule, f"{message}.", f"after token {answer.n_tokens}", seq_id=answer.seq_id
                )
        self._end(at_ms)

    def _learn_final(self, answer: Answer, chunk: Chunk) -> None:
        final = chunk.final
        answer.is_last = True
        answer.stop = answer.stop or stop_of(final)
        for name in ("generation_settings", "stop_type", "stopping_word", "system_fingerprint"):
            if name in final:
                answer.known[name] = as_fact(final[name])
        if is_whole(slot := final.get("id_slot")):
            answer.known["slot"] = slot
        settings = final.get("generation_settings")
        if isinstance(settings, dict):
            types = settings.get("speculative.types")
            if isinstance(types, str):
                self._run.learn_drafters(types)
