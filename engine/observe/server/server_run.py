"""The run of a server: parallel requests, and their responses recorded."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from engine.analysis.findings.check import record_findings
from engine.errors import OptionError, ServerError
from engine.observe.files.records.replies import PlainReplies
from engine.observe.rounds.counters import Counters, Movement, movement, read_counters
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.observe.server.client import ReportWaiting, ServerClient
from engine.observe.server.log_file import JoinedLog
from engine.observe.server.network_thread import Question, Sent
from engine.observe.server.reply import ExchangeEvent, Inbox, Wait
from engine.observe.server.request_options import ServerRequest
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import rows_by_sequence
from engine.trace.store import LOOK_S, TraceStore

_STEP_S = 0.5
_SEND_AGAIN = "Check the server's log; then send the request again."
_SLOTS_S = 1.0
_SETTLE_S = 2.0
"""How long the server is given to count what it has just finished, seconds."""
_LAST_S = 0.05
"""How long data in flight may still arrive once a run is stopped, seconds."""
_END_S = 2.0
"""How long a connection may stay open after the last event of its reply, seconds."""


@dataclass
class _Sent:
    """A request in flight. end: cancels it, None once it is over. wait: for an event, after the
    response's headers."""

    prompt: str
    observed: ObservedRequest
    end: Sent[None] | None
    lost: str = ""
    n_events: int = 0
    wait: Wait | None = None


class ServerRun:
    """A run of requests to one server, with the interface of any other run: `step` or `advance`
    until it returns False; observations are in `trace`, and as received in `observed`.

    parallel: number of requests in flight; the others wait. log: the server's log file, joined to
    the rounds. facts: JSON-able, further facts of the run. errors: of failed requests, in that
    order; the first is raised at the end. report: called with a sentence that counts up while the
    server is awaited, and with an empty one at the end of a wait; default: the client's. The client
    stays open.
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
        report: ReportWaiting | None = None,
        **facts: Any,
    ) -> None:
        self.trace, self.done = trace, False
        self.errors: list[ServerError] = []
        self.counted = Movement()
        """The change of the server's counters; empty if it has none."""
        self.uncounted = ""
        """Why the counters do not cover this run, one sentence."""
        self._client, self._requests, self._parallel = client, requests, max(1, parallel)
        self._can_resume = server.is_llama_server
        self._raw = [request.raw for request in requests]
        self._log = JoinedLog(log)
        self.observed = ObservedRun(trace, "ask", server, plain=PlainReplies(), **facts)
        self.run_id = self.observed.run_id
        self._log.follow(self.observed)
        self._inbox = Inbox()
        self._sent: list[_Sent] = []
        self._skipped: set[int] = set()
        self._next = 0
        self._start = self._returned = perf_counter()
        self._before: tuple[str, str] | None = None
        self._has_begun = self._has_looked = False
        self._question: Question[Any] | None = None
        """The question to the server in flight, one at a time."""
        self._held: ExchangeEvent | None = None
        """The first data, held until the server has named its drafters."""
        self._count_until = 0.0
        self._report, self._reported = report or client.report, ""

    @property
    def unread_log(self) -> str:
        """Why the log was not read to its end, and the remedy."""
        return self._log.unread

    @property
    def sequences(self) -> list[dict[str, Any]]:
        """The continuations so far: seq_id; prompt, empty if sent as ids; text; tokens, as far as
        their ids are known."""
        rows = rows_by_sequence(self.trace, self.run_id, EMITTED_KINDS)
        known = self.trace.tokens.column("token_id")
        ids = {
            seq_id: known[mine][known[mine] != MISSING].tolist() for seq_id, mine in rows.items()
        }
        return [
            {"seq_id": seq_id, "prompt": one.prompt, "text": text, "tokens": ids.get(seq_id, [])}
            for one in self._sent
            for seq_id, text in zip(one.observed.seq_ids, one.observed.texts, strict=True)
        ]

    @property
    def first_texts(self) -> Sequence[str]:
        """The continuation of the first prompt, in the pieces received; it grows."""
        return self._sent[0].observed.first_texts if self._sent else ()

    def step(self) -> bool:
        """Continue until a round is recorded or half a second has passed. True while more is to
        come. Raises ServerError at the end if a request failed."""
        rows, until = len(self.trace.rounds), perf_counter() + _STEP_S
        while len(self.trace.rounds) == rows and self._go_on(until - perf_counter()):
            if perf_counter() >= until:
                break
        return not self.done

    def advance(self, seconds: float = LOOK_S) -> bool:
        """Record arrivals for `seconds`; otherwise as `step`."""
        until = perf_counter() + seconds
        while self._go_on(until - perf_counter()) and perf_counter() < until:
            pass
        return not self.done

    def cancel(self, seq_id: int) -> None:
        """End a sequence's request, here and at the server; the others continue.

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
        """End all requests now, here and at the server; what has arrived stays. Does not wait for
        the server."""
        if self.done:
            return
        self._next = len(self._requests)
        open_ones = {i for i, one in enumerate(self._sent) if one.end is not None}
        for one in self._sent:
            if one.end is not None:
                one.end(_LAST_S)
        if self._question is not None:
            self._question()
        self._has_looked = True
        if self._held is not None:
            self._record(self._held)
        n_left, until = self._inbox.n_waiting, perf_counter() + 2 * _LAST_S
        while n_left > 0 or open_ones:
            arrival = self._inbox.take(until - perf_counter())
            if arrival is None:
                break
            n_left -= 1
            if arrival.kind in ("head", "data", "done"):
                self._record(arrival)
            if arrival.kind in ("done", "broke"):
                open_ones.discard(arrival.request)
            if n_left <= 0 and perf_counter() > until:
                break
        for i in range(len(self._sent)):
            self._break_off(i)
        if self._before is not None and not self.counted.moved:
            self.uncounted = "The run was stopped before the server's counters were read again."
        self._close()

    # -- inside ----------------------------------------------------------------------------

    def _go_on(self, seconds: float) -> bool:
        """Send waiting requests, record one arrival if any comes in time."""
        if self.done:
            return False
        seconds = max(0.0, seconds)
        busy, self._returned = perf_counter() - self._returned, perf_counter()
        for one in self._sent:
            if one.wait is not None:  # a pause of ours is not the server's delay
                one.wait = replace(one.wait, since=one.wait.since + busy)
        self._log.follow(self.observed)
        if not self._has_begun:
            self._has_begun, self._before = self._asked(self._client.ask_for_metrics, seconds)
        elif self._held is not None:
            self._look_at_slots(seconds)
        elif self._open or self._next < len(self._requests):
            self._send()
            arrival = self._inbox.take(seconds)
            if arrival is not None and arrival.kind == "data" and not self._has_looked:
                self._held = arrival
            elif arrival is not None:
                self._record(arrival)
                self._send()
            self._end_waiting()
        elif self._is_counted(seconds):
            self._close()
        self._returned = perf_counter()
        self._say_waiting()
        if self.done and self.errors:
            raise self.errors[0]
        return not self.done

    def _asked(self, ask: Callable[[], Question[Any]], seconds: float) -> tuple[bool, Any]:
        """Whether the question is settled, and its answer; None without one."""
        try:
            if self._question is None:
                self._question = ask()
            if not self._question.is_done(seconds):
                return False, None
            found = self._question.answer.result()
        except (ServerError, CancelledError):  # the client may be closed before the run ends
            found = None
        self._question = None
        return True, found

    def _end_waiting(self) -> None:
        """Give up requests past their time limit."""
        for one in self._sent:
            if one.end is None or one.wait is None or one.wait.seconds <= one.wait.limit:
                continue
            one.end()
            if one.observed.is_complete:
                one.observed.done(self._ms())
                self._over(one)
            else:
                error = one.wait.error
                one.observed.broke(error.message, self._ms())
                self._over(one, error)

    def _say_waiting(self) -> None:
        """Report the longest wait."""
        waits = [one.wait or one.end.awaited.wait for one in self._sent if one.end is not None]
        if self._question is not None:
            waits.append(self._question.awaited.wait)
        longest = max(filter(None, waits), key=lambda wait: wait.seconds, default=None)
        sentence = longest.sentence if longest is not None else ""
        if lost := next((one.lost for one in self._sent if one.end is not None and one.lost), ""):
            sentence = f"{lost.rstrip('.')}; requesting the rest"
        sentence = "" if self.done else sentence
        if sentence != self._reported:
            self._reported = sentence
            self._report(sentence)

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
            name = uuid.uuid4().hex if self._can_resume else None
            end = self._client.stream(number, request.path, self._raw[i], self._inbox, name)
            self._sent.append(_Sent(request.text, observed, end))

    def _record(self, arrival: ExchangeEvent) -> None:
        one = self._sent[arrival.request]
        if one.end is None:  # it was ended here
            return
        at_ms = (arrival.at - self._start) * 1e3
        if arrival.kind == "head":
            one.observed.head(arrival.status, arrival.headers, at_ms)
            one.wait = self._wait_for("the first event of", one)
        elif arrival.kind == "data":
            one.observed.data(arrival.data, at_ms)
            if one.observed.n_events > one.n_events:
                one.n_events = one.observed.n_events
                one.wait = self._wait_for("the next event of", one)
            if one.observed.is_over and one.end is not None:  # its data cannot be read any more
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
            if one.observed.known.get("status", 200) == 200:
                one.observed.broke(arrival.reason, at_ms)
            else:  # refused: nothing was truncated
                one.observed.known["error"] = arrival.reason
                one.observed.done(at_ms)
            self._over(one, arrival.error or ServerError(arrival.reason, _SEND_AGAIN))

    def _over(self, one: _Sent, error: ServerError | None = None) -> None:
        """A request is over. error: of a broken connection, if any."""
        one.end = None
        said = one.observed.known.get("error")
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

    def _wait_for(self, what: str, one: _Sent) -> Wait:
        limit, what = self._client.limits.timeout, f"{what} {self._client.address}"
        if one.observed.is_complete:
            limit, what = min(limit, _END_S), f"the end of the reply of {self._client.address}"
        return Wait(what, limit, "--timeout", perf_counter())

    def _close(self) -> None:
        self.done = True
        self._say_waiting()
        self._log.end(self.observed)
        self.observed.end(self.errors[0].message if self.errors else None)
        record_findings(self.trace, [self.run_id])

    def _is_counted(self, seconds: float) -> bool:
        """Compare the server's counters with what was recorded, once it has updated them."""
        if not self._log.is_settled(self.observed):
            sleep(min(seconds, LOOK_S))
            return False
        if self._before is None:
            return True
        self._count_until = self._count_until or perf_counter() + _SETTLE_S
        is_asked, after = self._asked(partial(self._client.ask_for_metrics, _SETTLE_S), seconds)
        if not is_asked:
            return False
        try:
            first, last = read_counters(self._before[0]), read_counters(after[0] if after else "")
        except ValueError:
            self.uncounted = "The server's /metrics cannot be read."
            return True
        if after is not None and last.busy and perf_counter() < self._count_until:
            sleep(min(seconds, LOOK_S))
            return False
        self._count(self._before, after, first, last)
        return True

    def _count(
        self,
        before: tuple[str, str],
        after: tuple[str, str] | None,
        first: Counters,
        last: Counters,
    ) -> None:
        if after is None:
            self.uncounted = "The server's /metrics no longer answers."
        elif after[1] != before[1]:
            self.uncounted = "The server was restarted in the meantime."
        elif first.busy or last.busy:
            self.uncounted = "The server is also processing requests of other clients."
        else:
            self.counted = movement(first, last)
            if self.counted.restarted:
                self.uncounted = "The server's counters went backwards."
            elif all(one.observed.known.get("complete") for one in self._sent):
                self.observed.counters(before[0], after[0])

    def _look_at_slots(self, seconds: float) -> None:
        """Read the drafters from a busy slot; responses name them only at their end."""
        ask = partial(self._client.ask_for_slots, _SLOTS_S)
        self._has_looked, slots = self._asked(ask, seconds)
        if not self._has_looked:
            return
        for slot in slots or ():
            params = slot.get("params")
            types = params.get("speculative.types") if isinstance(params, dict) else None
            if isinstance(types, str):
                self.observed.learn_drafters(types)
        if self._held is not None:
            held, self._held = self._held, None
            self._record(held)

    def _ms(self) -> float:
        return (perf_counter() - self._start) * 1e3
