"""The run of a proxy: requests of other programs, recorded."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep
from typing import Any

from engine.analysis.findings.check import record_findings
from engine.errors import DraftscopeError, OptionError
from engine.observe.files.records.replies import PlainReplies
from engine.observe.proxy.exchange_queue import ExchangeQueue
from engine.observe.proxy.proxy import Proxy
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.observed_run import ObservedRun, ServerFacts
from engine.observe.server.log_file import JoinedLog
from engine.observe.server.reply import ExchangeEvent
from engine.trace.store import LOOK_S, TraceStore

_STEP_S = 0.5


class ProxyRun:
    """A run that records a proxy's traffic, with the interface of any other run: `step` or
    `advance` until it is stopped; it does not end by itself.

    trace: receives the rows, all written by the thread that calls `advance`. Clients are served
    whether or not that is called. requests: requests so far, in order of arrival. observed: the
    same as received.
    """

    def __init__(
        self,
        server: ServerFacts,
        trace: TraceStore,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        adds_fields: bool = True,
        log: Path | None = None,
        **facts: Any,
    ) -> None:
        """Listen, and begin a run. port: 0 picks a free one. adds_fields: request the fields that
        show rounds where a client does not. log: the server's log file, joined to the rounds.
        facts: JSON-able, further facts of the run. Engines other than llama-server and llama-swap
        might reject such fields: their requests pass unchanged.

        Raises OptionError for addresses that are invalid or cannot be bound, and for an unreadable
        log.
        """
        self.trace, self.done = trace, False
        self.requests: list[ObservedRequest] = []
        self._open: dict[int, ObservedRequest] = {}
        self._log = JoinedLog(log)
        self._queue = ExchangeQueue()
        adds_fields &= server.is_llama_server or server.engine == "llama-swap"
        self._proxy = Proxy(server.address, self._queue, host, port, adds_fields=adds_fields)
        self._begin = monotonic()
        self.observed = ObservedRun(
            trace, "proxy", server, plain=PlainReplies(), listens_at=self._proxy.url, **facts
        )
        self.run_id = self.observed.run_id
        self._log.follow(self.observed)
        self._proxy.start()

    @property
    def url(self) -> str:
        """The proxy's address for clients."""
        return self._proxy.url

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can connect."""
        return self._proxy.is_local

    @property
    def unread_log(self) -> str:
        """Why the log was not read to its end, and the remedy."""
        return self._log.unread

    def step(self) -> bool:
        """Continue until a round is recorded or half a second has passed. True while it listens."""
        rows, until = len(self.trace.rounds), monotonic() + _STEP_S
        while self.advance() and len(self.trace.rounds) == rows and monotonic() < until:
            pass
        return not self.done

    def advance(self) -> bool:
        """Wait a moment and record the traffic. True while it listens.

        Raises DraftscopeError once the proxy has failed.
        """
        if self.done:
            return False
        sleep(LOOK_S)  # all at once: each look takes time from forwarding
        failed = not self._proxy.is_running
        self._record()
        self._log.follow(self.observed)
        if failed:
            message = f"Listening at {self.url} failed: {self._proxy.error}."
            self._end(message)
            raise DraftscopeError(message, "Watch the server again.")
        return True

    def cancel(self, seq_id: int) -> None:
        """End a sequence's request, for its client and at the server; the others continue.

        Raises OptionError for a sequence that is not open.
        """
        for number, request in self._open.items():
            if seq_id in request.seq_ids:
                self._proxy.abort(number)
                return
        raise OptionError(f"Sequence {seq_id} has ended.", "Choose one that is still running.")

    def stop(self) -> None:
        """Stop listening and end open requests; the recorded rows stay."""
        if not self.done:
            self._end(None)

    def _end(self, error: str | None) -> None:
        self.done = True
        self._proxy.stop()
        self._record()
        self._log.finish(self.observed)
        if n := self._queue.n_unrecorded:
            self._not_recorded(f"{n} requests arrived faster than they could be recorded.")
        self.observed.end(error)
        record_findings(self.trace, [self.run_id])

    def _not_recorded(self, reason: str, request: ObservedRequest | None = None) -> None:
        seq_id = request.seq_ids[0] if request is not None and request.seq_ids else None
        self.observed.find("not-recorded", reason, "it was forwarded", seq_id=seq_id)

    def _record(self) -> None:
        for event in self._queue.take():
            sleep(0)  # the forwarding thread may go first
            at_ms = (event.at - self._begin) * 1e3
            if event.kind == "request":
                request = self.observed.request(
                    event.path, event.data, at_ms, streamed_by_us=event.is_asked_by_us
                )
                self._open[event.request] = request
                self.requests.append(request)
                if event.reason:
                    self._not_recorded(f"A request was not recorded: it {event.reason}.", request)
            else:
                self._reply(event, at_ms)

    def _reply(self, event: ExchangeEvent, at_ms: float) -> None:
        request = self._open[event.request]
        if event.kind == "head":
            request.head(event.status, event.headers, at_ms)
        elif event.kind == "data":
            request.data(event.data, at_ms)
        else:
            del self._open[event.request]
            if event.kind == "done":
                request.done(at_ms)
            elif event.kind == "broke":
                request.broke(event.reason, at_ms)
            else:
                request.left(at_ms)
                if event.kind == "unrecorded":
                    self._not_recorded(event.reason, request)
