"""Server engine: servers as sessions; the first import of networking is here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from app.engine_thread.events import ANOTHER, Decoding, RunRequest, ServerSeen, TurnRequest
from engine.errors import Cancelled, OptionError, ServerError, ServerTimeoutError
from engine.long_work import ReportProgress
from engine.observe.server.address import server_address, store_key, stored_key
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from pathlib import Path

    from engine.observe.rounds.counters import Counters
    from engine.observe.rounds.observed_run import ServerFacts
    from engine.observe.server.client import ServerClient

LOOK_S = 2.0
"""Interval between status requests to a server, seconds."""
_PATIENCE_S = 0.5


class ServerEngine:
    """Servers. look_s: interval between status requests to the one in use, seconds."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._keys: dict[str, str] = {}
        """API keys by address, for this process, if there is no keyring."""

    def connect(
        self,
        address: str,
        progress: ReportProgress,
        see: Callable[[ServerSeen], None],
        wait: Callable[[str], None],
        cancelled: threading.Event,
        *,
        key: str = "",
        log: Path | None = None,
        timeout: float | None = None,
        model: str = "",
    ) -> ServedSession:
        """Wait until the server is ready; raises Cancelled once `cancelled` is set. A given key is
        stored once the server has accepted it.

        key: empty for the stored one, if any. log: the server's log file, to be combined with its
        replies. timeout: of its replies, seconds; None for the default. model: one of its models,
        empty if there is no choice.

        see: called with the server's status, on any thread, until the session is closed. wait:
        called with a sentence on what a run waits for at the server, empty when the wait ends.
        """
        from engine.observe.server.client import ServerClient
        from engine.observe.server.reply import TimeLimits

        address = server_address(address)
        progress(0, 0, f"connecting to {address}")
        known = key or self._keys.get(address) or stored_key(address)
        limits = TimeLimits() if timeout is None else TimeLimits(timeout=timeout)
        client = ServerClient(address, known or None, limits, model=model)
        try:
            facts = client.facts(lambda sentence: progress(0, 0, sentence), cancelled)
        except BaseException:
            client.close()
            raise
        kept = self._keep(address, known, is_new=bool(key)) if known else ""
        return ServedSession(client, facts, kept, log, see, wait, self._look_s)

    def _keep(self, address: str, key: str, *, is_new: bool) -> str:

        if address in self._keys and not is_new:
            return "session"
        if not is_new or store_key(address, key):
            self._keys.pop(address, None)
            return "keyring"
        self._keys[address] = key
        return "session"


class ServedSession:
    """A server in use. facts: its description of itself. key_kept: where the API key is: "keyring",
    "session" while this program runs, "" without one."""

    compute = ""
    memory = None

    def __init__(
        self,
        client: ServerClient,
        facts: ServerFacts,
        key_kept: str,
        log: Path | None,
        see: Callable[[ServerSeen], None],
        wait: Callable[[str], None],
        look_s: float,
    ) -> None:
        self._client, self.facts, self.key_kept = client, facts, key_kept
        self._log, self._wait = log, wait
        self._lookout = _Lookout(client, facts, see, look_s)

    def start(self, request: RunRequest, trace: TraceStore) -> Decoding:
        """Send the prompts, as many in parallel as the options say; their replies are the run."""
        from engine.observe.server.request_options import request_for
        from engine.observe.server.server_run import ServerRun

        try:
            requests = [
                request_for(self._client, self.facts, text, request.options, chat=request.chat)
                for text in request.texts
            ]
        except CancelledError:
            raise Cancelled from None
        return ServerRun(
            self._client,
            self.facts,
            requests,
            trace,
            parallel=request.options.parallel,
            log=self._log,
            report=self._wait,
        )

    def end_questions(self) -> None:
        """Abandon pending status requests; from any thread."""
        self._client.end_questions()

    def say(self, request: TurnRequest, trace: TraceStore) -> Decoding:
        """Always refused with OptionError."""
        raise OptionError(
            "A server's memory cannot be inspected, so it cannot run conversations here.",
            "Open the model's file.",
        )

    def watch(self, listen: str, trace: TraceStore) -> Decoding:
        from engine.observe.proxy.proxy import listening_address
        from engine.observe.proxy.proxy_run import ProxyRun

        return ProxyRun(self.facts, trace, *listening_address(listen))

    def compare(self, *_: object) -> NoReturn:
        """Always refused with OptionError, like the other two."""
        raise OptionError("A server has no logits to compare lanes by.", "Open its model.")

    play = check_rollback = compare

    def close(self) -> None:
        self._lookout.end(_PATIENCE_S)
        self._client.close()  # ends a pending request to a busy server
        self._lookout.join()


class _Lookout(threading.Thread):
    """Polls a server, and reports changes of its status."""

    def __init__(
        self,
        client: ServerClient,
        facts: ServerFacts,
        see: Callable[[ServerSeen], None],
        period: float,
    ) -> None:
        super().__init__(name="server lookout", daemon=True)
        self._client, self._facts, self._see, self._period = client, facts, see, period
        self._was_gone = False
        self._over = threading.Event()
        self._first: tuple[str, Counters] | None = None
        self._last = ServerSeen()
        """Its status at the last answer."""
        self.start()

    def end(self, timeout: float) -> None:
        """Stop polling, and wait this long for a pending request."""
        self._over.set()
        self.join(timeout)

    def run(self) -> None:
        last: ServerSeen | None = None
        while not self._over.is_set():
            with suppress(CancelledError, Cancelled):  # the client was closed
                seen = self._look()
                if seen is not None and seen != last and not self._over.is_set():
                    last = seen
                    self._see(seen)
            self._over.wait(self._period)

    def _look(self) -> ServerSeen | None:
        """The server's slots and counters, or why it is gone; None if it was too busy to answer."""
        try:
            if self._was_gone and self._is_another():
                return replace(self._last, gone=f"{self._client.address} {ANOTHER}")
            slots = self._client.slots()
            counters = self._counted()
        except ServerTimeoutError:
            return None
        except ServerError as error:
            self._was_gone = True
            return replace(self._last, gone=error.message)
        self._was_gone = False
        self._last = ServerSeen("", None if slots is None else tuple(slots), counters)
        return self._last

    def _is_another(self) -> bool:
        """Whether the server that answers again has another model or other settings."""
        from engine.observe.rounds.kept_requests import model_of, server_of

        now = self._client.facts(lambda _: None, self._over)
        then_said, now_said = (
            (server_of("", one.props), model_of(one.props, one.models, one.model))
            for one in (self._facts, now)
        )
        return then_said != now_said

    def _counted(self) -> dict[str, float] | None:
        """Growth of each counter since the first request, or since the server restarted."""
        from engine.observe.rounds.counters import Counters, movement, read_counters

        metrics = self._client.metrics()
        if metrics is None:
            return None
        text, start = metrics
        try:
            now = read_counters(text)
        except ValueError:
            return None
        if self._first is None:
            self._first = start, now
        moved = movement(self._first[1], now)
        if moved.restarted or start != self._first[0]:
            self._first = start, Counters()
            moved = movement(Counters(), now)
        return dict(moved.moved)
