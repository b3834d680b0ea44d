"""What was sent to a server and what came back becomes one run of a trace.

Live clients, the proxy and files of captures all write through here: bytes go in as they arrived,
rows of rounds come out once they are settled. What a server does not tell stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.trace.store import TraceStore

Attachment = Literal["ask", "proxy", "log", "light-log", "record"]
"""How a server was observed."""


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

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Its sequences in the trace, by index of the reply."""
        raise NotImplementedError

    def head(self, status: int, headers: Mapping[str, str], at_ms: float) -> None:
        """The reply began. headers: of the reply."""
        raise NotImplementedError

    def data(self, piece: bytes, at_ms: float) -> None:
        """A piece of the reply's body, cut anywhere. Never raises for what a server may send."""
        raise NotImplementedError

    def done(self, at_ms: float) -> None:
        """The reply ended by itself."""
        raise NotImplementedError

    def broke(self, reason: str, at_ms: float) -> None:
        """The reply was cut short. reason: one sentence for the user."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """What was generated so far."""
        raise NotImplementedError


class ObservedRun:
    """A run that is observed, from the first request until it is closed. One thread writes it."""

    def __init__(
        self, store: TraceStore, attachment: Attachment, server: ServerFacts, **facts: Any
    ) -> None:
        """Begin a run. facts: JSON-able, whatever else is known of it."""
        raise NotImplementedError

    run_id: int

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
        raise NotImplementedError

    def log(self, text: str) -> None:
        """Lines that the server wrote into its log, cut anywhere."""
        raise NotImplementedError

    def counters(self, before: str, after: str) -> None:
        """Replies of /metrics before and after; a difference from what was counted here becomes a
        finding."""
        raise NotImplementedError

    def end(self, error: str | None = None) -> None:
        """Nothing more comes: settle what is open, end the run."""
        raise NotImplementedError
