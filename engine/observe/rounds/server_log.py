"""Log of one process of a llama-server, line by line, in the wordings of builds of two years and of
ik_llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from engine.analysis.acceptance.accept_rules import REJECTION, SYNTHETIC, AcceptRule, rule_said
from engine.errors import check_most
from engine.foreign import COUNT, LONGEST_DRAFT, LONGEST_MS, OutOfRangeError, whole
from engine.observe.rounds.log_lines import (
    LONGEST_LINE,
    SHORTEST_LINE,
    STAMP,
    Time,
    may_have_stamp,
    microseconds,
)
from engine.observe.rounds.log_rounds import LogRequest, Slot
from engine.observe.rounds.log_words import (
    BUILD,
    CHUNK,
    IDS,
    IMPLEMENTATION,
    MODEL,
    PLANES,
    SLOT,
    START,
    Saying,
    Value,
    candidate_saying,
    file_name,
    free_slot_saying,
    is_open,
    launch_saying,
    looks_like_sums,
    server_saying,
    slot_saying,
    values_of,
)
from engine.observe.rounds.server_state import MOST_DRAFTERS, ServerState

MOST_REQUESTS = 1 << 16
_MANY_REQUESTS = 1 << 14
"""Requests without rounds that are kept separately: each is about 1.5 KB of session.json."""
_MOST_SERVERS = 1000
_YEARS_US = int(LONGEST_MS / 2 * 1e3)
RESTART_US = 5_000_000
"""Fall of the clock that means another process: threads write out of order."""
_MOST_RESTARTS = 64
"""Restarts detected by the clock alone; a log with more is not in order."""
_SHOWN = 100
_OWN = ("spec", "srv ", "cmn ", "que ")
"""Start of messages of the server's own parts."""
_DEEPEST = 8
"""Entries examined within a line."""
_CHANGES_MORE = re.compile("build|Aggregate|found better prompt|model loaded|llama_server")
"""Messages that change what is known of a server, or of which only the first has an effect."""
Read: TypeAlias = tuple[str, tuple[Value, ...], int, Saying | None]
"""How a message was read: whether it is of a "slot", a "free" one, the "server" or "nothing", the
slot and its task, where the rest starts, and its meaning."""
_NOTHING: Read = ("nothing", (), 0, None)


class ServerLog(ServerState):
    """The log of one process of a server."""

    def __init__(self, servers: LogServers, stream: str) -> None:
        super().__init__(servers.joins)
        self._servers = servers
        self.stream = stream
        self.n_rs_seq: int | None = None
        self.drafters: list[str] = []
        self.is_synthetic = False
        self.said_rule: AcceptRule | None = None
        self.has_times = False
        self.model = ""
        """File name of the model."""
        self.build = ""
        self.launch: dict[str, list[str]] = {}
        """Distinct values by the names of log_words.launch_saying, at most MOST_DRAFTERS."""
        self.is_whole = False
        """Whether the log contains the start of the process."""
        self.n_unread = 0
        """Number of unreadable lines."""
        self.first_unread = ""
        """Place of the first of them, and the reason."""
        self.has_wrong_numbers = False
        self.last_read: Read | None = None
        """The reading of the newest line, if it applies to its shape."""
        self.inner: re.Match[str] | None = None
        """Time of the inner entry that the newest line was read as."""
        self.is_waiting = False
        """Whether the newest line may be continued."""
        self._waiting: tuple[int, Time, str] = 0, None, ""
        self.first_us: int | None = None
        self._depth = 0

    def add(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """Read the next line, which may continue the previous one if a token's text has split it.
        Returns the log for the following lines: a new one if a process started."""
        self.last_read = self.inner = None
        if self.is_waiting:
            return self._go_on(number, time, message, is_head)
        if not is_head and message is not None and len(message) < SHORTEST_LINE:
            self.last_read = _NOTHING
            return self
        if message is None:
            self._bad(number, "it is not valid JSON")
        elif message.rstrip()[-1:] == "'" and "draft candidate" in message:
            end = message.rstrip()[-2:]  # a text that may start with a quote, or a line end
            if end == "''" or (end == " '" and is_open(message)):
                self.is_waiting, self._waiting = True, (number, time, message)
            else:
                self._read_candidate(number, message)
        elif ("next token:" in message or "draft candidate" in message) and is_open(message):
            self.is_waiting, self._waiting = True, (number, time, message)
        else:
            return self._take(number, time, message, is_head)
        return self

    def _go_on(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """Read the line after one whose token text may continue."""
        first, at, before = self._waiting
        if not is_head and message is not None and len(before) < LONGEST_LINE:
            self._waiting = first, at, f"{before}\n{message}"
            return self
        self._close()
        return self.add(number, time, message, is_head)

    def end(self) -> None:
        """End of this process's lines for now."""
        self._close()
        self._place_candidates()

    def _close(self) -> None:
        """The newest line is complete."""
        if self.is_waiting:
            self.is_waiting = False
            number, time, message = self._waiting
            if "draft candidate" in message and message[:4] != "slot":
                self._read_candidate(number, message)
            else:
                self._take(number, time, message, True)
        self.last_read = None

    def _read_candidate(self, line: int, message: str) -> None:
        saying = candidate_saying(message)
        try:
            if saying is None:
                self._not_taken(line, message)
            else:
                self.on_candidate((line, None, ""), *values_of(message, saying[2]))
                self.last_read = "server", (), 0, saying
        except OutOfRangeError as error:
            self._bad(line, str(error))

    @property
    def rule(self) -> AcceptRule | None:
        """How drafted tokens are accepted, from a line or from the drafts."""
        if self.is_synthetic:
            return AcceptRule(SYNTHETIC)
        return self.said_rule or (AcceptRule(REJECTION) if self.draws else None)

    @property
    def said(self) -> dict[str, Any]:
        """Address and launch settings, as facts of a run."""
        return {"launch": self.launch} | ({"address": self.stream} if self.stream else {})

    @property
    def unread(self) -> list[dict[str, Any]]:
        """Findings about unreadable or missing lines, as facts of a run."""
        found = []
        if self.n_unread:
            message = (
                "Entries of the log cannot be read; the rest of their requests is not shown"
                if self.has_wrong_numbers
                else "Lines that look like a server's rounds or totals could not be read"
            )
            evidence = f"{self.n_unread:,} of them; the first is {self.first_unread}"
            message = f"{message}: {evidence}."
            found.append({"rule": "log-unread", "message": message, "evidence": evidence})
        if n := self.n_undrafted:
            said = f"{n:,} rounds with 0 drafted tokens, as of builds of late 2025, are not shown."
            found.append({"rule": "log-unread", "message": said, "evidence": ""})
        if self.first_missing:
            n = sum(one.n_missing for one in self.requests)
            message = "Lines of the log are missing: only the remaining rounds are shown."
            evidence = f"{n:,} tokens have no line; the first gap is {self.first_missing}"
            found.append({"rule": "log-lines-missing", "message": message, "evidence": evidence})
        return found

    def begins_again(self, us: int | None) -> bool:
        """Whether another process writes: the clock restarts."""
        if us is None or self.last_us is None or us >= self.last_us - RESTART_US:
            return False
        return len(self._servers.servers) < _MOST_RESTARTS

    def _take(self, line: int, time: Time, message: str, is_head: bool) -> ServerLog:
        """Read one entry."""
        slot: Slot | None = None
        us = microseconds(time)
        try:
            if us is not None:
                self.first_us = us if self.first_us is None else self.first_us
                if not -_YEARS_US < us - self.first_us < _YEARS_US:
                    raise OutOfRangeError("its time is years away from that of the first entry")
                self.has_times = True
            is_slots = message[:4] == "slot"
            found = SLOT.match(message) if is_slots else None
            if found is None and "id_slot=" in message:
                found = IDS.search(message)
            if found is None:
                is_start = "llama_server: init" in message or START.match(message) is not None
                if is_start and self.requests:
                    return self._servers.begins(self.stream).add(line, time, message, is_head)
                self.is_whole |= is_start
                self._of_server(line, us, message)
                self.last_read = None if is_start else self.last_read
                return self
            number, task = int(found[1]), int(found[2])
            at = found.end() if is_slots else 0
            said = message[at:]
            head = (*found.span(1), COUNT), (*found.span(2), COUNT)
            if task < 0:
                if (saying := free_slot_saying(said)) is not None:
                    self._say(line, us, said, saying, number)
                self.last_read = "free", head[:1], at, saying
                return self
            if task > COUNT:
                raise OutOfRangeError(f"task {task} is more than {COUNT:,}")
            if self.requests and self.begins_again(us):
                return self._servers.begins(self.stream).add(line, time, message, is_head)
            slot = self.slot(number, task)
            self.last_us = us
            if slot.request.is_broken:
                return self
            if (saying := slot_saying(said)) is None:
                if self._not_taken(line, said):
                    self.last_read = "slot", head, at, None
            elif self._say(line, us, said, saying, slot):
                self.last_read = "slot", head, at, saying
        except OutOfRangeError as error:
            self._bad(line, str(error))
            if slot is not None:
                slot.request.is_broken = True
                if slot.request.rounds and not slot.request.rounds[-1].is_complete:
                    slot.request.rounds.pop()
        return self

    def _say(
        self, line: int, us: int | None, said: str, saying: Saying, *whose: Slot | int
    ) -> bool:
        """Apply a message; returns whether it was accepted. whose: the slot, or its number."""
        name, kind, places = saying
        take: Callable[..., bool | None] = getattr(self, f"on_{name}")
        is_taken = take(*whose, (line, us, kind), *values_of(said, places)) is not False
        if not is_taken:
            self._not_taken(line, said)
        return is_taken

    def _bad(self, line: int, why: str) -> None:
        self.has_wrong_numbers = True
        self._unread(line, why)

    def _unread(self, line: int, why: str) -> None:
        self.n_unread += 1
        self.first_unread = self.first_unread or f"line {line}: {why}"

    def _not_taken(self, line: int, message: str) -> bool:
        """Count an unread line; returns whether it is meaningless."""
        if (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
            self.last_read = None
        elif looks_like_sums(message):
            self._unread(line, repr(message[:_SHOWN]))
        else:
            return True
        return False

    def _add_inner(self, line: int, inner: re.Match[str]) -> None:
        if self._depth < _DEEPEST:
            self._depth += 1
            self.add(line, inner, inner.string[inner.end() :], True)
            self._depth -= 1
            self.inner = self.inner or inner

    @staticmethod
    def _inner(message: str) -> re.Match[str] | None:
        """The time of an entry within a line, because some messages lack a line end."""
        return STAMP.search(message, 0, LONGEST_LINE) if may_have_stamp(message) else None

    def _of_server(self, line: int, us: int | None, message: str) -> None:
        if CHUNK in message:
            return  # generated text may look like an entry
        self._prompts.server(message)
        if message[:4] not in _OWN and (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
            self.last_read = None if _CHANGES_MORE.search(message) else self.last_read
        elif "adding speculative" in message:
            found = IMPLEMENTATION.search(message)
            if found is not None and len(self.drafters) < MOST_DRAFTERS:
                self.drafters.append(found[1])
        elif "loading model" in message and (found := MODEL.search(message)) is not None:
            self.model = file_name(found[1])
        elif not self.build and "build" in message and (found := BUILD.search(message)):
            self.build = found[1]
        elif "n_rs_seq" in message and (found := PLANES.search(message)) is not None:
            n_rs_seq = whole(found[1], LONGEST_DRAFT)
            self.n_rs_seq = n_rs_seq if self.n_rs_seq is None else self.n_rs_seq
        elif "synthetic speculative acceptance is enabled" in message:
            self.is_synthetic = True
        elif "sampling" in message and (rule := rule_said(message)) is not None:
            self.said_rule = rule
        elif launched := launch_saying(message):
            for name, value in launched.items():
                known = self.launch.setdefault(name, [])
                if value not in known and len(known) < MOST_DRAFTERS:
                    known.append(value)
        elif (saying := server_saying(message)) is not None:
            if self._say(line, us, message, saying):
                self.last_read = "server", (), 0, saying
        elif self._not_taken(line, message) and not _CHANGES_MORE.search(message):
            self.last_read = _NOTHING


class LogServers:
    """The processes that wrote a log. requests: of all of them, in the order in which their tasks
    began."""

    def __init__(self, fold: Callable[[ServerLog], int] | None) -> None:
        self.requests: list[LogRequest] = []
        self.servers: list[ServerLog] = []
        self._fold = fold
        self._most = MOST_REQUESTS if fold is None else min(_MANY_REQUESTS, MOST_REQUESTS)

    def joins(self, request: LogRequest) -> None:
        """Add a request. Raises TraceFileError for more than a trace can hold."""
        if len(self.requests) >= self._most and not self._make_room():
            check_most("The log", len(self.requests) + 1, MOST_REQUESTS, "requests")
        self.requests.append(request)

    def _make_room(self) -> bool:
        """Merge requests if necessary; returns whether there is room."""
        n_folded = [] if self._fold is None else [self._fold(one) for one in self.servers]
        if any(n_folded):
            self.requests = [one for server in self.servers for one in server.requests]
        elif self._most < MOST_REQUESTS:
            self._most = MOST_REQUESTS
        return len(self.requests) < self._most

    def begins(self, stream: str) -> ServerLog:
        """Start the log of a process, a server's first or next one."""
        of = "servers, or starts of one"
        check_most("The log", len(self.servers) + 1, _MOST_SERVERS, of)
        self.servers.append(ServerLog(self, stream))
        return self.servers[-1]

    # -- of a log that one server writes while it is observed --------------------------------

    @property
    def server(self) -> ServerLog:
        """The last process with requests, or with any lines."""
        busy = [one for one in self.servers if one.requests] or self.servers
        return busy[-1] if busy else ServerLog(self, "")

    @property
    def is_light(self) -> bool:
        """Whether the log is in the light form, without tokens."""
        return self.server.is_light

    @property
    def unread(self) -> list[dict[str, Any]]:
        """Findings about unreadable or missing lines."""
        return [finding for one in self.servers for finding in one.unread]
