"""A run whose tokens come from a server: requests sent side by side, their replies recorded."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from engine.errors import OptionError, ServerError
from engine.findings.check import record_findings
from engine.observe.rounds.counters import Movement, movement, read_counters
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.observe.server.client import ServerClient
from engine.observe.server.inbox import Arrival, Inbox
from engine.observe.server.log_file import JoinedLog
from engine.observe.server.reply import CONNECT_S
from engine.observe.server.request_options import ServerRequest
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.store import LOOK_S, TraceStore
from engine.trace.timings import summary

_STEP_S = 0.5
_SEND_AGAIN = "See what the server's log says; then send it again."
_SLOTS_S = 1.0
_SETTLE_S = 2.0
"""How long the server is given to count what it has just finished, seconds."""


@dataclass(frozen=True, slots=True)
class AnsweredSequence:
    """prompt: its text, empty where it was sent as ids. tokens: ids of the continuation, as far as
    they are known."""

    seq_id: int
    prompt: str
    text: str
    tokens: list[int]


@dataclass
class _Sent:
    """A request that was sent. end: breaks it off, None once it is over."""

    prompt: str
    observed: ObservedRequest
    end: Callable[[], None] | None
    lost: str = ""


class ServerRun:
    """A run of requests to one server, of the shape of any other run: `step` or `advance` until it
    returns False; what was observed is in `trace`, and as it came in `observed`.

    parallel: requests that are sent at once; the others wait. log: file that the server writes its
    log into; what it tells is joined to the rounds. facts: JSON-able, whatever else is
    known of the run. errors: of requests that failed, in the order in which they did; the first
    one is raised once everything is over. The client stays open.
    """

    def __init__(
        self,
        client: ServerClient,
        server: ServerFacts,
        requests: Sequence[ServerRequest],
        trace: TraceStore,
        *,
        parallel: int = 1,
        log: Path | None = None,
        **facts: Any,
    ) -> None:
        self.trace, self.done = trace, False
        self.errors: list[ServerError] = []
        self.counted = Movement()
        """How far the counters of the server moved; nothing where it keeps none."""
        self.uncounted = ""
        """Why they say nothing of this run, one sentence."""
        self._client, self._requests, self._parallel = client, requests, max(1, parallel)
        self._raw = [request.raw for request in requests]
        self._log = JoinedLog(log) if log is not None else None
        self.observed = ObservedRun(trace, "ask", server, **facts)
        self.run_id = self.observed.run_id
        if self._log is not None:
            self._log.follow(self.observed)
        self._inbox = Inbox()
        self._sent: list[_Sent] = []
        self._skipped: set[int] = set()
        self._next = 0
        self._start = perf_counter()
        self._before: tuple[str, str] | None = None
        self._has_begun = self._has_looked = False

    @property
    def lost(self) -> str:
        """A sentence on a connection that broke and is looked for again; empty while all is
        well."""
        return next((one.lost for one in self._sent if one.end and one.lost), "")

    @property
    def unread_log(self) -> str:
        """Why the log was not read to its end, and what to do about it."""
        return "" if self._log is None else self._log.unread

    @property
    def sequences(self) -> list[AnsweredSequence]:
        """What the prompts were continued with, so far."""
        tokens, n = self.trace.tokens, len(self.trace.tokens)
        ids: dict[int, list[int]] = {}
        rows = zip(
            tokens.column("run_id", 0, n).tolist(),
            tokens.column("seq_id", 0, n).tolist(),
            tokens.column("token_id", 0, n).tolist(),
            tokens.texts("kind", 0, n),
            strict=True,
        )
        for run_id, seq_id, token_id, kind in rows:
            if run_id == self.run_id and kind in EMITTED_KINDS and token_id != MISSING:
                ids.setdefault(seq_id, []).append(token_id)
        return [
            AnsweredSequence(seq_id, one.prompt, text, ids.get(seq_id, []))
            for one in self._sent
            for seq_id, text in zip(one.observed.seq_ids, one.observed.texts, strict=True)
        ]

    @property
    def first_text(self) -> str:
        """What the first prompt was continued with, so far."""
        return self._sent[0].observed.texts[0] if self._sent else ""

    def step(self) -> bool:
        """Go on until a round was recorded, or half a second has passed without any. True while
        more is to come. Raises ServerError at the end, where a request failed."""
        rows, until = len(self.trace.rounds), perf_counter() + _STEP_S
        while len(self.trace.rounds) == rows and self._go_on(until - perf_counter()):
            if perf_counter() >= until:
                break
        return not self.done

    def advance(self, seconds: float = LOOK_S) -> bool:
        """Record for so long what arrives; otherwise as `step`."""
        until = perf_counter() + seconds
        while self._go_on(until - perf_counter()) and perf_counter() < until:
            pass
        return not self.done

    def cancel(self, seq_id: int) -> None:
        """End the request of a sequence, here and at the server; the others go on.

        Raises OptionError for a sequence that the run does not have.
        """
        for i, one in enumerate(self._sent):
            if seq_id in one.observed.seq_ids:
                self._break_off(i)
                return
        if not len(self._sent) <= seq_id < len(self._requests):
            raise OptionError(f"The run has no sequence {seq_id}.", "Name one that is shown.")
        self._skipped.add(seq_id)

    def stop(self) -> None:
        """End all requests now, here and at the server; what was recorded stays."""
        if self.done:
            return
        self._next = len(self._requests)
        while (arrival := self._inbox.take(0)) is not None:
            self._record(arrival)
        for i in range(len(self._sent)):
            self._break_off(i)
        self._close()

    def summary(self) -> dict[str, Any]:
        """Figures over all sequences (engine.trace.timings)."""
        return summary(self.trace, self.run_id)

    # -- inside ----------------------------------------------------------------------------

    def _go_on(self, seconds: float) -> bool:
        """Send what may be sent, record one arrival if any comes in time."""
        if self.done:
            return False
        if not self._has_begun:
            self._has_begun = True
            self._before = self._metrics()
        if self._log is not None:
            self._log.follow(self.observed)
        self._send()
        arrival = self._inbox.take(max(0.0, seconds))
        if arrival is not None:
            self._record(arrival)
            self._send()
        if not self._open and self._next == len(self._requests):
            self._close()
            if self.errors:
                raise self.errors[0]
        return not self.done

    @property
    def _open(self) -> int:
        return sum(one.end is not None for one in self._sent)

    def _send(self) -> None:
        while self._next < len(self._requests) and self._open < self._parallel:
            i = self._next
            self._next += 1
            if i in self._skipped:
                continue
            request, number = self._requests[i], len(self._sent)
            observed = self.observed.request(request.path, self._raw[i], self._ms())
            name = uuid.uuid4().hex
            end = self._client.stream(number, request.path, self._raw[i], self._inbox, name)
            self._sent.append(_Sent(request.text, observed, end))

    def _record(self, arrival: Arrival) -> None:
        one = self._sent[arrival.request]
        if one.end is None:  # it was ended here
            return
        at_ms = (arrival.at - self._start) * 1e3
        if arrival.kind == "head":
            one.observed.head(arrival.status, arrival.headers, at_ms)
        elif arrival.kind == "data":
            if not self._has_looked:
                self._look_at_slots()
            one.observed.data(arrival.data, at_ms)
            if one.observed.is_over and one.end is not None:  # nothing of it can be read any more
                one.end()
                self._over(one)
        elif arrival.kind == "lost":
            one.lost = arrival.reason
        elif arrival.kind == "resumed":
            one.lost = ""
        elif arrival.kind == "done":
            one.observed.done(at_ms)
            self._over(one)
        else:
            if one.observed.facts.get("status", 200) == 200:
                one.observed.broke(arrival.reason, at_ms)
            else:  # refused: nothing was cut short
                one.observed.facts["error"] = arrival.reason
                one.observed.done(at_ms)
            self._over(one, arrival.error or ServerError(arrival.reason, _SEND_AGAIN))

    def _over(self, one: _Sent, error: ServerError | None = None) -> None:
        """Nothing more comes of a request. error: what broke it, if the connection did."""
        one.end = None
        facts = one.observed.facts
        said = facts.get("error")
        if error is None and isinstance(said, str):
            error = ServerError(said if said.endswith(".") else f"{said}.", _SEND_AGAIN)
        if error is not None:
            self.errors.append(error)

    def _break_off(self, number: int) -> None:
        one = self._sent[number]
        if one.end is not None:
            one.end()
            one.end = None
            one.observed.left(self._ms())

    def _close(self) -> None:
        self.done = True
        if self._log is not None:
            self._log.finish(self.observed)
        self._count()
        self.observed.end(self.errors[0].message if self.errors else None)
        record_findings(self.trace, [self.run_id])

    def _count(self) -> None:
        """Compare the server's counters with what was recorded."""
        before, until = self._before, perf_counter() + _SETTLE_S
        if before is None:
            return
        try:
            while (after := self._metrics(_SETTLE_S)) is not None:
                first, last = read_counters(before[0]), read_counters(after[0])
                if not last.busy or perf_counter() >= until:
                    break
                sleep(LOOK_S)
        except ValueError:
            self.uncounted = "The server's /metrics cannot be read."
            return
        if after is None:
            self.uncounted = "The server's /metrics does not answer any more."
        elif after[1] != before[1]:
            self.uncounted = "The server was started again in the meantime."
        elif first.busy or last.busy:
            self.uncounted = "The server works at requests of others."
        else:
            self.counted = movement(first, last)
            if self.counted.restarted:
                self.uncounted = "The server's counters went backwards."
            elif all(one.observed.facts.get("complete") for one in self._sent):
                self.observed.counters(before[0], after[0])

    def _look_at_slots(self) -> None:
        """A slot that works at a request names the drafters; replies do at their end."""
        self._has_looked = True
        try:
            slots = self._client.slots(_SLOTS_S) or []
        except ServerError:
            return
        for slot in slots:
            params = slot.get("params")
            types = params.get("speculative.types") if isinstance(params, dict) else None
            if isinstance(types, str):
                self.observed.learn_drafters(types)

    def _metrics(self, seconds: float = CONNECT_S) -> tuple[str, str] | None:
        try:
            return self._client.metrics(seconds)
        except (ServerError, CancelledError):  # the client may be closed before the run ends
            return None

    def _ms(self) -> float:
        return (perf_counter() - self._start) * 1e3
