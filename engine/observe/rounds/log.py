"""Rounds and sums read from the log of a llama-server: at `-lv 5` with LLAMA_TRACE=1 all rounds
with their tokens, with LLAMA_TRACE=1 alone those with a draft (the light form), else the sums that
every request ends with. Builds of two years and ik_llama.cpp have other words for the same."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from engine.errors import TraceFileError
from engine.foreign_numbers import COUNT, LONGEST_DRAFT, LONGEST_MS, OutOfRangeError, real, whole
from engine.observe.rounds.log_lines import (
    LONGEST_LINE,
    SHORTEST_LINE,
    STAMP,
    LogLines,
    OtherLines,
    Time,
    may_have_stamp,
    microseconds,
)
from engine.observe.rounds.log_prompts import LoggedPrompt, PromptLog
from engine.observe.rounds.log_rounds import UNKNOWN_TOKEN, Counts, LogRequest, LogRound, PhaseClock
from engine.observe.rounds.log_shapes import (
    FEW,
    LONGEST_SHAPE,
    MOST_SHAPES,
    Block,
    LightRows,
    Reading,
)
from engine.observe.rounds.log_words import (
    BUILD,
    IDS,
    IMPLEMENTATION,
    LOOKS_LIKE,
    MODEL,
    PLANES,
    SLOT,
    START,
    Saying,
    Value,
    candidate_saying,
    free_slot_saying,
    is_open,
    may_look_like,
    server_saying,
    slot_saying,
    values_of,
)

MOST_REQUESTS = 1 << 16
MOST_ROUNDS = 1 << 22
_MOST_DRAFTERS = 64
_MOST_SERVERS = 1000
_MOST_SPEEDS = 1000
"""Of one request; a server writes one every three seconds."""
_YEARS_US = int(LONGEST_MS / 2 * 1e3)
RESTART_US = 5_000_000
"""So far a clock has to fall before it is another process's: threads write out of order."""
_MOST_RESTARTS = 64
"""Seen by the clock alone; the lines of a log with more are not in their order."""
_SHOWN = 100
_OWN = ("spec", "srv ", "cmn ", "que ")
"""What messages of the server's own parts begin with."""
_FEW_LINES = 64
"""Of which the shapes are not looked for."""
_MOST_LINES = 1 << 16
"""Of a block."""
_DEEPEST = 8
"""Entries within a line that are looked at."""
_LOOKED_AT = 200
_CHANGES_MORE = re.compile("build|Aggregate|found better prompt|model loaded|llama_server")
"""In messages that change what is known of a server, or of which only the first one does."""
Read: TypeAlias = tuple[str, tuple[Value, ...], int, Saying | None]
"""How a message was read: whether it is of a "slot", of a "free" one, of the "server" or "nothing"
at all, the slot and its task, where the rest begins, and what that says."""
_NOTHING: Read = ("nothing", (), 0, None)


@dataclass(slots=True)
class _Slot:
    """The state of a slot. replay: a restore was logged and its replay has not ended."""

    request: LogRequest
    round: LogRound | None = None
    candidates: dict[int, dict[int, tuple[int, float]]] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    replay: bool = False


class ServerLog:
    """What one process of a server wrote. requests: in the order in which their tasks began."""

    def __init__(self, reader: LogReader, stream: str) -> None:
        self.stream = stream
        self.requests: list[LogRequest] = []
        self.pieces: dict[int, bytes] = {}
        """Of tokens that were drafted or emitted, as far as they are whole characters."""
        self.n_rs_seq: int | None = None
        self.drafters: list[str] = []
        self.is_synthetic = False
        self.is_light = True
        self.has_times = False
        self.model = ""
        """The model's file, by its name."""
        self.build = ""
        self.is_whole = False
        """Whether the log has the start of the process."""
        self.n_unread = 0
        """Lines that cannot be read."""
        self.first_unread = ""
        """Where the first of them is, and why."""
        self.has_wrong_numbers = False
        self.first_missing = ""
        self.last_read: Read | None = None
        """How the newest line was read, where another line of its shape says the same."""
        self.is_waiting = False
        """Whether the newest line may go on in the next one."""
        self.slots: dict[int, _Slot] = {}
        self.last_us: int | None = None
        """The clock at the newest message of a slot."""
        self._reader = reader
        self._waiting: tuple[int, Time, str] = 0, None, ""
        self._candidates: list[tuple[int, int, int, int, float, str]] = []
        """Drafted tokens that no round has yet."""
        self._prompts = PromptLog()
        self._current: LogRequest | None = None
        self._impls: list[tuple[str, int, int]] = []
        self._clock = PhaseClock()
        self.first_us: int | None = None
        self._counts: dict[str, Counts] = {}
        self._depth = 0
        self._says_at_once = False
        """Whether rounds are written before their tokens; what names them later repeats them."""

    def add(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """The next line; it may go on with the one before it, which a token's text has cut. Returns
        the log that takes the lines that follow: a new one where a process began."""
        self.last_read = None
        if self.is_waiting:
            return self._go_on(number, time, message, is_head)
        if not is_head and message is not None and len(message) < SHORTEST_LINE:
            self.last_read = _NOTHING
            return self
        if message is None:
            self._bad(number, "it is not valid JSON")
        elif message.rstrip()[-1:] == "'" and "draft candidate" in message:
            if message.rstrip()[-2:] == "''":  # of a text that may begin with a quote
                self.is_waiting, self._waiting = True, (number, time, message)
            else:
                self._read_candidate(number, message)
        elif ("next token:" in message or "draft candidate" in message) and is_open(message):
            self.is_waiting, self._waiting = True, (number, time, message)
        else:
            return self._take(number, time, message, is_head)
        return self

    def _go_on(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """The line after one whose token may go on."""
        first, at, before = self._waiting
        if not is_head and message is not None and len(before) < LONGEST_LINE:
            self._waiting = first, at, f"{before}\n{message}"
            return self
        self.end()
        return self.add(number, time, message, is_head)

    def end(self) -> None:
        """Nothing more comes of this process for now."""
        if self.is_waiting:
            self.is_waiting = False
            number, time, message = self._waiting
            if "draft candidate" in message and message[:4] != "slot":
                self._read_candidate(number, message)
            else:
                self._take(number, time, message, True)
        self._place_candidates()
        self.last_read = None

    def _read_candidate(self, line: int, message: str) -> None:
        saying = candidate_saying(message)
        try:
            if saying is None:
                self._not_taken(line, message)
            else:
                self.on_candidate(line, None, "", *values_of(message, saying[2]))
                self.last_read = "server", (), 0, saying
        except OutOfRangeError as error:
            self._bad(line, str(error))

    @property
    def unread(self) -> list[dict[str, Any]]:
        """The findings about lines that cannot be read or are missing, as a run keeps them."""
        found = []
        if self.n_unread:
            message = (
                "Entries of the log cannot be read; of their requests nothing after them is shown."
                if self.has_wrong_numbers
                else "Lines look like those of a server's rounds or sums and are not read."
            )
            evidence = f"{self.n_unread:,} of them; the first is {self.first_unread}"
            found.append({"rule": "log-unread", "message": message, "evidence": evidence})
        if self.first_missing:
            n = sum(one.n_missing for one in self.requests)
            message = "Lines of the log are missing: rounds are those that are left in it."
            evidence = f"{n:,} tokens have no line; the first gap is {self.first_missing}"
            found.append({"rule": "log-lines-missing", "message": message, "evidence": evidence})
        return found

    def takes_light(self, rounds: np.ndarray) -> bool:
        """Rounds of the light form, one for each row with slot, task, accepted, drafted and time in
        microseconds (-1 without). Whether they were taken: none of them where one is anything else
        than the round after another one of a request."""
        number, task, accepted, drafted, us = rounds.T
        if not self.is_light or self._clock.is_at_work or (accepted > drafted).any():
            return False
        last = -1 if self.last_us is None else self.last_us
        if us[0] < last or (us[1:] < us[:-1]).any():
            return False
        found = []
        for key in np.unique(number << 32 | task).tolist():
            slot = self.slots.get(key >> 32)
            if slot is None or slot.request.task != key & COUNT or slot.replay:
                return False
            if slot.request.is_broken:
                return False
            found.append((slot, (number == key >> 32).nonzero()[0]))
        for slot, rows in found:
            *earlier, newest = rows.tolist()
            if earlier:
                batch = rounds[earlier][:, 2:].astype(np.int64)
                slot.request.batches.append((len(slot.request.rounds), batch))
                self._reader.n_rounds += len(earlier)
            at = int(us[newest])
            one = LogRound(None, int(drafted[newest]), int(accepted[newest]), is_complete=True)
            one.end_us = None if at < 0 else at
            self._add_round(slot, one)
        self.last_us = None if us[-1] < 0 else int(us[-1])
        self._says_at_once, self._current = True, self.slots[int(number[-1])].request
        return True

    def begins_again(self, us: int | None) -> bool:
        """Whether another process writes: the clock begins again."""
        if us is None or self.last_us is None or us >= self.last_us - RESTART_US:
            return False
        return len(self._reader.servers) < _MOST_RESTARTS

    def _take(self, line: int, time: Time, message: str, is_head: bool) -> ServerLog:
        """One entry."""
        slot: _Slot | None = None
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
                    return self._reader.restarted(self).add(line, time, message, is_head)
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
                return self._reader.restarted(self).add(line, time, message, is_head)
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
        self, line: int, us: int | None, said: str, saying: Saying, *whose: _Slot | int
    ) -> bool:
        """Take what a message says; whether it was taken. whose: the slot, or its number."""
        name, kind, places = saying
        is_taken: bool = getattr(self, f"on_{name}")(
            *whose, line, us, kind, *values_of(said, places)
        )
        if not is_taken:
            self._not_taken(line, said)
        return is_taken

    def _bad(self, line: int, why: str) -> None:
        self.has_wrong_numbers = True
        self._unread(line, why)

    @property
    def known_unread(self) -> tuple[int, str, bool]:
        """What is known of lines that cannot be read; the last one of a log may be cut."""
        return self.n_unread, self.first_unread, self.has_wrong_numbers

    @known_unread.setter
    def known_unread(self, known: tuple[int, str, bool]) -> None:
        self.n_unread, self.first_unread, self.has_wrong_numbers = known

    def _unread(self, line: int, why: str) -> None:
        self.n_unread += 1
        self.first_unread = self.first_unread or f"line {line}: {why}"

    def _not_taken(self, line: int, message: str) -> bool:
        """A line that nothing was made of. Whether there is nothing in it."""
        if (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
        elif LOOKS_LIKE.search(message, 0, _LOOKED_AT) if may_look_like(message) else False:
            self._unread(line, repr(message[:_SHOWN]))
        else:
            return True
        return False

    def _add_inner(self, line: int, inner: re.Match[str]) -> None:
        if self._depth < _DEEPEST:
            self._depth += 1
            self.add(line, inner, inner.string[inner.end() :], True)
            self._depth -= 1
        self.last_read = None

    @staticmethod
    def _inner(message: str) -> re.Match[str] | None:
        """The time of an entry within a line: some messages have no end, so that one follows."""
        return STAMP.search(message, 0, LONGEST_LINE) if may_have_stamp(message) else None

    def _of_server(self, line: int, us: int | None, message: str) -> None:
        self._prompts.server(message)
        if message[:4] not in _OWN and (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
        elif "adding speculative" in message:
            found = IMPLEMENTATION.search(message)
            if found is not None and len(self.drafters) < _MOST_DRAFTERS:
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
        elif (saying := server_saying(message)) is not None:
            if self._say(line, us, message, saying):
                self.last_read = "server", (), 0, saying
        elif self._not_taken(line, message) and not _CHANGES_MORE.search(message):
            self.last_read = _NOTHING

    def slot(self, number: int, task: int) -> _Slot:
        """The slot, at work for a task."""
        slot = self.slots.get(number)
        if slot is None or slot.request.task != task:
            if slot is not None:
                slot.request.is_over = True
            slot = self.slots[number] = _Slot(self._request(number, task))
        self._current = slot.request
        return slot

    def _request(self, number: int, task: int) -> LogRequest:
        request = LogRequest(number, task)
        self._reader.joins(request)
        self.requests.append(request)
        return request

    def works_on(self, slot: _Slot, us: int | None) -> None:
        """A message of a slot came, at a time."""
        self.last_us, self._current = us, slot.request

    # -- what messages say: by the names that log_words gives them. Each raises OutOfRangeError
    # before it changes anything, and returns whether it was taken ------------------------------

    def on_token(
        self, slot: _Slot, line: int, us: int | None, _kind: str, number: int, id_: int, text: str
    ) -> bool:
        """A token was sampled."""
        if self.is_light:
            self.is_light = False
            for earlier in self.requests:
                earlier.unfold()
        request, token = slot.request, (id_, text)
        self._learn(id_, text)
        if number <= request.last_n:
            return True  # a line that was copied twice
        n_missing, before = number - request.last_n - 1, request.last_n
        request.last_n = number
        if n_missing:
            request.n_missing += n_missing
            self.first_missing = self.first_missing or (
                f"before line {line}: n_gen is {number:,} after {before:,}"
            )
        if number == 1:
            request.first, request.first_us = token, us
        elif slot.round is not None:
            one = slot.round
            if one.first_n is None:
                one.first_n = number
            elif n_missing and len(one.tokens) + n_missing <= one.accepted + 1:
                one.tokens += [UNKNOWN_TOKEN] * n_missing
            one.tokens.append(token)
            if one.end_us is None and us is not None:
                one.end_us = us
                self._clock.ends(one, us)
        return True

    def on_speed(
        self,
        slot: _Slot,
        _line: int,
        us: int | None,
        _kind: str,
        n: int,
        speed: float,
        recent: float | None,
    ) -> bool:
        """How fast a request is so far."""
        speeds = slot.request.speeds
        if len(speeds) >= _MOST_SPEEDS:  # of a long answer every second, and so on
            del speeds[1::2]
        speeds.append((None if us is None else us / 1e3, n, speed, recent))
        return True

    def on_accepted(
        self, slot: _Slot, _line: int, us: int | None, kind: str, accepted: int, drafted: int
    ) -> bool:
        """A round was verified. kind: "restores", or "again" where others say it a second time."""
        if accepted > (drafted or LONGEST_DRAFT):
            raise OutOfRangeError(f"{accepted:,} is more than {drafted:,}")
        if kind == "again":
            if self._says_at_once:
                return True
            if drafted < accepted:  # some say 0 drafted of all rounds
                return False
        else:
            self._says_at_once = True
        restores = kind == "restores"
        if slot.replay and not restores:
            slot.replay = False  # the counts are those of the replay
            if slot.round is not None:
                slot.round.is_complete, slot.round.end_us = True, us
                self._clock.ends(slot.round, us)
            return True
        if slot.round is None or slot.round.is_complete or self.is_light:
            self._add_round(slot, LogRound(None, drafted))
        one = slot.round
        assert one is not None
        one.drafted, one.accepted, one.restored, one.end_us = drafted, accepted, restores, us
        self._clock.ends(one, us)
        slot.replay, one.is_complete = restores, not restores
        return True

    def _add_round(self, slot: _Slot, one: LogRound) -> None:
        slot.round = one
        self._reader.n_rounds += 1
        slot.request.rounds.append(one)

    def on_generated(
        self,
        slot: _Slot,
        _line: int,
        _us: int | None,
        _kind: str,
        history: int,
        drafted: int,
        pos: int,
    ) -> bool:
        """A draft is complete: a round begins, unless one is replayed."""
        if not slot.replay:
            self._begin(slot, history, drafted, pos)
        self._clock.joins(slot.round)
        return True

    def on_decoded(self, slot: _Slot, _line: int, _us: int | None, _kind: str, pos: int) -> bool:
        """A round without a draft."""
        one = LogRound(pos, 0, is_complete=True)
        self._add_round(slot, one)
        self._clock.joins(one)
        return True

    def on_saved(self, slot: _Slot, _line: int, us: int | None, _kind: str, mib: float) -> bool:
        """A checkpoint of the memory was saved before a round."""
        slot.checkpoint_bytes = round(mib * 2**20)
        self._clock.mark(us, "saved")
        return True

    def on_restoring(
        self, slot: _Slot, _line: int, _us: int | None, _kind: str, n_bytes: int
    ) -> bool:
        """A round's checkpoint is restored."""
        if slot.round is not None:
            slot.round.checkpoint_bytes = n_bytes
        return True

    def on_mark(self, *args: Any) -> bool:
        """A phase begins or ends, of a slot or of the server."""
        *_, us, kind = args
        self._clock.mark(us, kind)
        return True

    def on_prompt(self, slot: _Slot, _line: int, _us: int | None, _kind: str, n: int) -> bool:
        """A prompt came."""
        slot.request.n_prompt = self._prompt(slot).n_prompt = n
        return True

    def on_common(
        self,
        slot: _Slot,
        _line: int,
        _us: int | None,
        _kind: str,
        n_common: int,
        n_held: int,
        pos_min: int | None,
        n_swa: int | None,
    ) -> bool:
        """What a prompt has in common with what its slot held, which could not be kept as is."""
        prompt = self._prompt(slot)
        prompt.n_common, prompt.n_held, prompt.n_swa = n_common, n_held, n_swa or 0
        prompt.pos_min = -1 if pos_min is None else pos_min
        return True

    def on_forced(self, slot: _Slot, *_args: Any) -> bool:
        """All of the prompt is processed."""
        self._prompt(slot).is_forced = True
        return True

    def on_cached(
        self, slot: _Slot, _line: int, _us: int | None, _kind: str, n: int | None, m: int | None
    ) -> bool:
        """Tokens of the prompt that are there; later parts of it say it again."""
        request, prompt = slot.request, self._prompt(slot)
        known = m or 0 if n is None else n
        request.n_cached = known if request.n_cached is None else request.n_cached
        prompt.cached = known if prompt.cached is None else prompt.cached
        return True

    def on_checkpoint(
        self,
        slot: _Slot,
        _line: int,
        _us: int | None,
        kind: str,
        last: int | None,
        n_tokens: int | None,
        mib: float | None,
    ) -> bool:
        """A context checkpoint is created, restored, erased or makes room ("erasing")."""
        n = n_tokens or (0 if last is None else last + 1)
        self._prompts.checkpoint(self._prompt(slot), kind, n, round((mib or 0.0) * 2**20))
        return True

    def on_selected(
        self,
        number: int,
        _line: int,
        _us: int | None,
        _kind: str,
        by: str,
        similarity: float | None,
        kept: float | None,
    ) -> bool:
        """A slot was chosen for the next request."""
        shares = None if kept is None else (min(similarity or 0.0, 1.0), min(kept, 1.0))
        self._prompts.selected(number, by, shares)
        return True

    def on_released(
        self,
        slot: _Slot,
        _line: int,
        _us: int | None,
        _kind: str,
        n_tokens: int | None,
        truncated: int | None,
    ) -> bool:
        """A slot is done with its request."""
        slot.request.is_over = True
        if n_tokens is not None:
            self._prompts.released(self._prompt(slot), n_tokens, is_whole=truncated == 0)
        return True

    def on_prompt_time(
        self, slot: _Slot, _line: int, _us: int | None, _kind: str, ms: float, n: int
    ) -> bool:
        """The sums of a prompt."""
        prompt = self._prompt(slot)
        prompt.prompt_ms, prompt.processed = ms, n
        if prompt.n_prompt is None and prompt.cached is not None:
            prompt.n_prompt = prompt.cached + n
        return _prompt_sums(slot.request, ms, n)

    def on_eval_time(
        self, slot: _Slot, _line: int, _us: int | None, _kind: str, ms: float, n: int
    ) -> bool:
        """The sums of an answer."""
        self._prompt(slot).written = n
        return _answer_sums(slot.request, ms, n)

    def on_sums(self, slot: _Slot, _line: int, _us: int | None, _kind: str, *sums: Any) -> bool:
        """The sums of the drafts of a request."""
        return _draft_sums(slot.request, *sums)

    def on_bare(self, _line: int, _us: int | None, kind: str, *sums: Any) -> bool:
        """Sums without a slot: of the slot that the line before names, or of a request that the
        log does not show otherwise."""
        request, take = self._current, _BARE_SUMS[kind]
        is_new = request is None or (
            request.prompt_ms is not None or request.predicted is not None
            if kind == "prompt_time"
            else request.predicted is not None
            if kind == "eval_time"
            else request.drafted is not None and sums[1] is not None
        )
        if is_new or request is None:
            if sums[1] is None:
                return False
            request = LogRequest(-1, -1)
            take(request, *sums)
            self._reader.joins(request)
            self.requests.append(request)
            self._current = request
            return True
        return not request.is_broken and take(request, *sums)

    def on_statistics(
        self,
        _line: int,
        _us: int | None,
        _kind: str,
        name: str,
        drafts: int,
        tokens: int,
        accepted: int,
    ) -> bool:
        """Sums of a drafter over all requests so far, written after those of one."""
        now = drafts, tokens, accepted
        if len(self._counts) < _MOST_DRAFTERS or name in self._counts:
            if self._current is not None:
                self._current.statistics[name] = now, self._counts.get(name)
            self._counts[name] = now
        return True

    def on_impl(self, _line: int, us: int | None, _kind: str, name: str, size: int, n: int) -> bool:
        """A drafter has drafted."""
        self._clock.mark(us, "drafted")
        self._impls.append((name, size, n))
        del self._impls[:-64]
        return True

    def on_candidate(
        self,
        _line: int,
        _us: int | None,
        _kind: str,
        number: int,
        rank: int,
        at: int,
        token: int,
        p: float,
        text: str,
    ) -> bool:
        """A token that a drafter looked at."""
        self._candidates.append((number, rank, at, token, p, text))
        return True

    def _prompt(self, slot: _Slot) -> LoggedPrompt:
        """What the log tells of the prompt of a slot's request."""
        request = slot.request
        if request.prompt is None:
            request.prompt = self._prompts.begin(request.slot)
        return request.prompt

    def _begin(self, slot: _Slot, history: int, drafted: int, pos: int) -> None:
        self._place_candidates()
        one = LogRound(pos, drafted)
        self._add_round(slot, one)
        one.checkpoint_bytes, slot.checkpoint_bytes = slot.checkpoint_bytes, None
        for i, (name, size, n) in enumerate(self._impls):
            # a draft may be cut after the drafter, never lengthened
            if size == history and n >= drafted:
                one.drafter = name
                del self._impls[i]
                break
        n_told = drafted if len(slot.candidates) >= drafted else 0
        tops = [slot.candidates.get(i, {}) for i in range(n_told)]
        if tops and all(0 in top for top in tops) and "ngram" not in one.drafter:
            one.draft = tuple(tuple(top[k] for k in sorted(top)) for top in tops)
        slot.candidates = {}

    def _place_candidates(self) -> None:
        """Give their slots the drafted tokens since the last time."""
        new, self._candidates = self._candidates, []
        for number, rank, at, token, p, text in new:
            slot = self.slots.get(number)
            if slot is not None and rank < 8 and at < LONGEST_DRAFT:
                if not rank and not at:
                    slot.candidates = {}
                slot.candidates.setdefault(at, {})[rank] = token, min(p, 1.0)
                self._learn(token, text)

    def _learn(self, token_id: int, text: str) -> None:
        if text and token_id not in self.pieces and "\ufffd" not in text:
            self.pieces[token_id] = text.encode("utf-8", "replace")


def _prompt_sums(request: LogRequest, ms: float, n: int) -> bool:
    request.prompt_ms, request.n_processed = ms, n
    if request.n_prompt is None and request.n_cached is not None:
        request.n_prompt = request.n_cached + n
    return True


def _answer_sums(request: LogRequest, ms: float, n: int) -> bool:
    request.predicted_ms, request.predicted, request.is_over = ms, n, True
    return True


def _draft_sums(
    request: LogRequest,
    ratio: str | None,
    accepted: int | None,
    drafted: int | None,
    mean: str | None,
    rates: str | None,
) -> bool:
    if accepted is not None and drafted is not None:
        whole(str(accepted), drafted)  # it cannot be more
    parts = [] if rates is None else [one.strip() for one in rates.split(",")]
    if len(parts) > LONGEST_DRAFT:
        raise OutOfRangeError(f"{len(parts):,} positions are more than {LONGEST_DRAFT:,}")
    values = [real(one, 1.0) for one in parts if one]
    if ratio is not None:
        request.ratio, request.accepted, request.drafted = ratio, accepted, drafted
    request.mean_length = request.mean_length if mean is None else mean
    request.rates = request.rates if rates is None else values
    return True


_BARE_SUMS: dict[str, Callable[..., bool]] = {
    "prompt_time": _prompt_sums,
    "eval_time": _answer_sums,
    "sums": _draft_sums,
}


class LogReader:
    """Reads a log as it grows. servers: the processes that wrote it, each with what it wrote.
    requests: of all of them, in the order in which their tasks began."""

    def __init__(
        self,
        others: OtherLines | None = None,
        fold: Callable[[ServerLog], int] | None = None,
        *,
        has_batches: bool = False,
    ) -> None:
        """others: takes lines of other engines. fold: where there are more requests
        than a trace can hold, makes room among those of a server; returns for how many.
        has_batches: whether rounds of the light form may be kept as batches."""
        self.requests: list[LogRequest] = []
        self.servers: list[ServerLog] = []
        self._lines, self._others, self._fold = LogLines(others), others, fold
        self._has_batches = has_batches
        self.n_rounds = 0
        self._by_stream: dict[str, ServerLog] = {}
        self._waiting: set[str] = set()
        """Servers whose newest line may go on in the next one."""
        self._n_block = _FEW_LINES
        """Lines that are looked at together; few at first, since none of their shapes is known."""
        self._readings: dict[bytes, Reading] = {}
        """By shape."""
        self._kinds: dict[tuple[Any, ...], Reading] = {}
        """The same by their keys."""

    def feed(self, text: str) -> None:
        """More of the log, cut anywhere. Raises TraceFileError for more than a trace can hold."""
        self._take(self._lines.lines(text))

    def end(self) -> None:
        """Nothing more comes: the last entry is complete, unless the server ended in it."""
        known = {one: one.known_unread for one in self.servers}
        self._take(self._lines.last_lines())
        for server in self._by_stream.values():
            server.end()
            if self._lines.is_cut and server in known:
                server.known_unread = known[server]

    def _take(self, lines: list[str]) -> None:
        at = 0
        while at < len(lines):
            block = lines[at : at + self._n_block]
            at += len(block)
            if len(block) < _FEW_LINES:
                for line in block:
                    self._place(line)
            else:
                self._take_block(block)
                self._n_block = min(2 * self._n_block, _MOST_LINES)
        if self.n_rounds > MOST_ROUNDS:
            raise TraceFileError(
                f"The log has more than {MOST_ROUNDS:,} rounds.", "Cut it into several files."
            )

    def _take_block(self, lines: list[str]) -> None:
        """Many lines: those of known shapes by columns, the others one by one. Lines that say
        nothing are passed over."""
        before, block = self._lines.number, Block(lines)
        numbers = {shape: i for i, shape in enumerate(dict.fromkeys(block.shapes))}
        of_line = np.fromiter(map(numbers.__getitem__, block.shapes), np.int64, len(lines))
        known = [self._readings.get(shape) for shape in numbers]
        readings = list(map(known.__getitem__, of_line.tolist()))
        values, light = self._columns(block, known, of_line)
        says_more = np.array([one is None or one.whose != "nothing" for one in known])
        todo = np.flatnonzero(says_more[of_line]).tolist()
        runs = light.runs(todo)
        n_learned, at, placed = self._lines.n_learned, 0, -1
        while at < len(todo):
            i = todo[at]
            if (n := runs.get(at, 0)) and self._say_light(light, todo[at : at + n]):
                at += n
                continue
            reading, row = readings[i], values.get(i) or light.row(i)
            if reading is not None and row is not None and self._say(reading, before + i + 1, row):
                at += 1
                continue
            self._lines.last = self._stream_before(block, readings, i, placed)
            self._lines.number = before + i
            self._place(lines[i], None if reading is not None else block.shapes[i])
            while self._is_waiting and i + 1 < len(lines):
                i += 1
                self._place(lines[i], None)
            if self._lines.n_learned != n_learned:  # what was learned is of other prefixes
                self._readings.clear()
                self._kinds.clear()
                n_learned = self._lines.n_learned
            placed = i
            at = bisect_right(todo, i, at)
        self._lines.last = self._stream_before(block, readings, len(lines), placed)
        self._lines.number = before + len(lines)

    def _columns(
        self, block: Block, known: list[Reading | None], of_line: np.ndarray
    ) -> tuple[dict[int, tuple[Any, ...]], LightRows]:
        """Values of lines, by their numbers in the block. known: how lines of each shape are read;
        of_line: the shape of each line."""
        kinds: dict[Reading | None, int] = {}
        kind = np.array([kinds.setdefault(one, len(kinds)) for one in known])[of_line]
        order = np.argsort(kind, kind="stable")
        ends = np.cumsum(np.bincount(kind, minlength=len(kinds)))
        values: dict[int, tuple[Any, ...]] = {}
        light = LightRows(len(of_line))
        for reading, rows in zip(kinds, np.split(order, ends[:-1]), strict=True):
            if reading is None or reading.whose == "nothing" or len(rows) < FEW:
                continue
            is_light = self._has_batches and (reading.name, reading.kind) == ("accepted", "")
            if is_light and light.add(block, reading, rows, self._lines.source):
                continue
            is_other = reading.whose == "other" and self._others is not None
            names: OtherLines | LogLines | None = self._others if is_other else self._lines
            assert names is not None
            values.update(block.rows(reading, rows, names.source))
        return values, light

    def _say(self, reading: Reading, line: int, row: tuple[Any, ...]) -> bool:
        """Take what a line of a known shape says; False for one that has to be looked at as a
        whole. row: its server, time and values."""
        if reading.whose == "other":
            return self._say_other(reading, line, row)
        server, us = self._by_stream.get(row[0]), row[1]
        if server is None or server.is_waiting:
            return False
        handler, kind = reading.handler, reading.kind
        try:
            if reading.whose == "server":
                return handler is not None and handler(server, line, us, kind, *row[2:])
            if reading.whose == "free":
                return handler is not None and handler(server, row[2], line, us, kind, *row[3:])
            slot = server.slots.get(row[2])
            if server.requests and server.begins_again(us):
                return False
            if slot is None or slot.request.task != row[3]:
                slot = server.slot(row[2], row[3])
            server.works_on(slot, us)
            if handler is None or slot.request.is_broken:
                return True
            return handler(server, slot, line, us, kind, *row[4:])
        except OutOfRangeError:
            return False

    def _say_other(self, reading: Reading, line: int, row: tuple[Any, ...]) -> bool:
        others, (source, _, *values) = self._others, row
        try:
            return others is not None and others.say(
                reading.name, line, source, reading.kind, *values
            )
        except OutOfRangeError:
            return False

    @property
    def _is_waiting(self) -> bool:
        """Whether the next line may belong to the one before."""
        return bool(self._waiting) or (self._others is not None and self._others.is_waiting)

    def _say_light(self, light: LightRows, lines: list[int]) -> bool:
        server = self._by_stream.get(light.stream(lines[0]))
        return server is not None and not server.is_waiting and server.takes_light(light.at(lines))

    def _stream_before(
        self, block: Block, readings: list[Reading | None], i: int, placed: int
    ) -> str:
        """The server that the line before is of. placed: the newest line that was placed."""
        for at in range(i - 1, placed, -1):
            one = readings[at]
            if one is not None and one.is_own:
                found = block.streams(one, np.array([at]), self._lines.source)
                return found if isinstance(found, str) else found[0]
        return self._lines.last

    def _place(self, line: str, shape: bytes | None = None) -> None:
        """A line by itself; how it was read is kept for others of its shape."""
        n, by_stream = 0, self._by_stream
        for stream, number, time, message, is_head in self._lines.placed(line):
            n += 1
            server = by_stream.get(stream)
            if server is None:
                server = by_stream[stream] = self._server(stream)
            after = by_stream[stream] = server.add(number, time, message, is_head)
            if after.is_waiting:
                self._waiting.add(stream)
            else:
                self._waiting.discard(stream)
        reading = None
        if shape is None or len(shape) > LONGEST_SHAPE or shape in self._readings:
            return
        if n == 0 and self._others is not None and self._others.last_read is not None:
            reading = self._other_reading(line, *self._others.last_read)
        elif n == 1 and server is after and message is not None and after.last_read is not None:
            reading = self._reading(line, stream, time, message, after.last_read)
        if reading is not None:
            if len(self._readings) >= MOST_SHAPES:
                self._readings.clear()
                self._kinds.clear()
            self._readings[shape] = self._kinds.setdefault(reading.key, reading)

    def _other_reading(self, line: str, saying: Saying, said: str, source: str) -> Reading | None:
        """How lines of another engine's shape are read."""
        start = line.find(said)
        if start < 0 or "\\u" in line or self._others is None:
            return None
        reading = Reading(line, "other", saying, source, is_own=False)
        begin, end, _ = saying[2][0]
        prefix = None if start else said[begin:end]
        is_known = reading.add(line, start, saying[2]) and reading.set_prefix(
            line, prefix, self._others.source
        )
        return reading if is_known else None

    def _reading(
        self, line: str, stream: str, time: Time, message: str, read: Read
    ) -> Reading | None:
        """How lines of a shape are read, from one that was; None where others may be different."""
        whose, head, at, saying = read
        start = len(line) - len(message) if line.endswith(message) else line.find(message)
        if start < 0 or "\\u" in line:
            return None
        if whose == "free" and saying is None:
            whose, head = "nothing", ()
        if whose == "nothing":
            time = None
        reading = Reading(line, whose, saying, stream, is_own=self._lines.is_own)
        if saying is not None:
            reading.handler = getattr(ServerLog, f"on_{saying[0]}")
        if not reading.is_own and whose != "nothing":
            return None
        is_known = (
            reading.add(line, start, head)
            and (saying is None or reading.add(line, start + at, saying[2]))
            and reading.set_time(line, time)
            and reading.set_prefix(line, self._lines.prefix, self._lines.source)
        )
        return reading if is_known else None

    def joins(self, request: LogRequest) -> None:
        """A request more. Raises TraceFileError for more than a trace can hold."""
        if len(self.requests) >= MOST_REQUESTS and not self._make_room():
            raise TraceFileError(
                f"The log tells of more than {MOST_REQUESTS:,} requests.",
                "Cut it into several files.",
            )
        self.requests.append(request)

    def _make_room(self) -> bool:
        """Whether requests were taken together."""
        if self._fold is not None and any(self._fold(server) > 0 for server in self.servers):
            self.requests = [one for server in self.servers for one in server.requests]
        return len(self.requests) < MOST_REQUESTS

    def restarted(self, server: ServerLog) -> ServerLog:
        """The log of the process that comes after another one's."""
        return self._server(server.stream)

    def _server(self, stream: str) -> ServerLog:
        if len(self.servers) >= _MOST_SERVERS:
            raise TraceFileError(
                f"The log has more than {_MOST_SERVERS:,} servers, or starts of one.",
                "Cut it into several files.",
            )
        self.servers.append(ServerLog(self, stream))
        return self.servers[-1]

    # -- of a log that one server writes while it is observed --------------------------------

    @property
    def server(self) -> ServerLog:
        """The last process that had requests, or wrote at all."""
        busy = [one for one in self.servers if one.requests] or self.servers
        return busy[-1] if busy else ServerLog(self, "")

    @property
    def is_light(self) -> bool:
        """Whether the log has no tokens."""
        return self.server.is_light

    @property
    def unread(self) -> list[dict[str, Any]]:
        """The findings about lines that cannot be read or are missing."""
        return [finding for one in self.servers for finding in one.unread]


def file_name(path: str) -> str:
    """The last part of a path of any system."""
    return re.split(r"[\\/]", path)[-1]
