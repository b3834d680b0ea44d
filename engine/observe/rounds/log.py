"""Rounds and sums read from the log of a llama-server: at `-lv 5` with LLAMA_TRACE=1 all rounds
with their tokens, with LLAMA_TRACE=1 alone those with a draft (the light form), else the sums that
every request ends with. Builds of two years and ik_llama.cpp have other words for the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import TraceFileError
from engine.foreign_numbers import (
    COUNT,
    LARGEST,
    LONGEST_DRAFT,
    LONGEST_MS,
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    OutOfRangeError,
    real,
    whole,
)
from engine.observe.rounds.log_lines import (
    LONGEST_LINE,
    SHORTEST_LINE,
    STAMP,
    LogLine,
    LogLines,
    Time,
    may_have_stamp,
    microseconds,
)
from engine.observe.rounds.log_prompts import LoggedPrompt, PromptLog

MOST_REQUESTS = 1 << 16
MOST_ROUNDS = 1 << 22
_MOST_DRAFTERS = 64
_MOST_SERVERS = 1000
_MOST_SPEEDS = 1000
"""Of one request; a server writes one every three seconds."""
_LONG_US = 3_600_000_000
_YEARS_US = int(LONGEST_MS / 2 * 1e3)
_RESTART_US = 5_000_000
"""So far a clock has to fall before it is another process's: threads write out of order."""
_MOST_RESTARTS = 64
"""Seen by the clock alone; the lines of a log with more are not in their order."""
_SHOWN = 100
# In none of these may what is repeated begin in several places of a text and run to its end: gaps
# are bounded, and what ends a text is looked for from its end.
_LIGHT = re.compile(
    r"slot .{1,33}?: id {1,40}+(\d{1,9}) \| task (\d{1,9}) \| accepted {1,40}+(\d{1,4})/"
    r" {0,40}+(\d{1,4}) draft tokens$"
)
_SLOT = re.compile(r"slot .{1,33}?: id {1,40}+(\d{1,9}) \| task (-?\d{1,10}) \| ?")
_IDS = re.compile(r"\bid_slot=(\d{1,9}) id_task=(\d{1,10})\b")
_CANDIDATE = re.compile(
    r"- seq_id (\d+), draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\) '"
)
_IMPL = re.compile(r"called impl (\S+), hist size = (\d+), call_count = \d+, gen = (\d+)")
_IMPLEMENTATION = re.compile(r"adding speculative implementation '([^']{1,200})'")
_GENERATE = re.compile(r"generate_draft: id=-?\d+, #tokens=(\d+), #draft=(\d+), pos_next=(\d+)")
_DECODE = re.compile(r"slot decode token, id=-?\d+,.{0,200} n_tokens = (\d+)")
_CREATED = re.compile(r"created speculative checkpoint \(.{0,400} size = ([\d.]+) MiB")
_RESTORING = re.compile(r"restoring speculative checkpoint \(.{0,400} size = (\d+)\)")
_ACCEPTED = re.compile(
    r"accepted\s{1,40}+(\d+)/\s{0,40}+(\d+) draft tokens"
    r"(?:( \(restore checkpoint\))|(, new n_(?:tokens|past) = ))?"
)
_TOKEN = re.compile(r"(?:n_gen|n_decoded) = (\d+), n_remaining = -?\d+, next token:\s+(\d+) '")
_PROMPT = re.compile(r"new prompt, .{0,200}?(?:task\.n_tokens|n_prompt_tokens) = (\d+)")
_CACHED = re.compile(
    r"(?:cached )?n_tokens = (\d+)(?:, memory_seq_rm|\s*$)|cached n_tokens = (\d+)"
)
_SPEED = re.compile(
    r"(?:n_gen|n_decoded) =\s{0,40}+(\d+), tg =\s{0,40}+([\d.]+) t/s"
    r"(?:, tg_3s =\s{0,40}+([\d.]+) t/s)?"
)
_PROMPT_TIME = re.compile(
    r"prompt eval time\s{0,40}+=\s{0,40}+([\d.]+) ms /\s{0,40}+(\d+) (?:tokens|runs)"
)
_EVAL_TIME = re.compile(
    r"(?<!prompt )eval time\s{0,40}+=\s{0,40}+([\d.]+) ms /\s{0,40}+(\d+) (?:tokens|runs)"
)
_SUMS = re.compile(
    r"draft acceptance(?: rate)?\s{0,40}+=\s{0,40}+([-.\w]{1,40}) "
    r"\(\s{0,40}+(\d+) accepted /\s{0,40}+(\d+) generated\)"
)
_MEAN = re.compile(r"mean (?:acceptance )?len(?:gth)?\s{0,40}+=\s{0,40}+([\d.]{1,40})")
_BY_POSITION = re.compile(
    r"(?:acceptance rate per position|acc(?:eptance)?(?: rate)? per pos(?:ition)?)"
    r"\s{0,40}+[=:]\s{0,40}+\(([\d., ]{1,8192})\)"
)
_STATISTICS = re.compile(
    r"statistics\s{1,40}+(\S{1,64}): #calls.{0,200}?#gen drafts\s{0,40}+=\s{0,40}+(\d+),"
    r".{0,100}?#gen tokens\s{0,40}+=\s{0,40}+(\d+), #acc tokens\s{0,40}+=\s{0,40}+(\d+)"
)
_MODEL = re.compile(r"load_model: loading model '([^']{1,4096})'")
_BUILD = re.compile(r"build(?:_info)?\s*[:=]\s*(\S{1,200})")
_PLANES = re.compile(r"llama_context: n_rs_seq\s+= (\d+)")
_START = re.compile(r"llama_server: initializing|build: \d|main: server is listening")
_LOOKS_LIKE = re.compile(
    r"(?:^|\| )(?:n_gen|n_decoded) =|accepted\s{1,4}\d+/|draft acceptance"
    r"|eval time\s{0,5}=|#gen drafts|draft candidate"
)
"""What no line of a server has that says nothing of rounds and sums."""
_OWN = ("spec", "srv ", "cmn ", "que ")
"""What messages of the server's own parts begin with."""
_DEEPEST = 8
"""Entries within a line that are looked at."""
_LOOKED_AT = 200
_NO_TOKENS: list[tuple[int, str]] = []
_NO_PHASES: dict[str, float] = {}
"""Of rounds of the light form, which have none."""
UNKNOWN_TOKEN = (-1, "")
"""A token whose line the log does not have."""


@dataclass(slots=True, eq=False)
class LogRound:
    """One verification. pos: position of its first token; None in the light form. drafted: number
    of tokens. draft: of those of a drafter with a model, the candidates of each, ids and
    probabilities, the proposed one first. tokens: emitted ids with their
    text. end_us: on the server's clock, None without times. phases: milliseconds by phase."""

    pos: int | None
    drafted: int
    accepted: int = 0
    restored: bool = False
    drafter: str = ""
    draft: tuple[tuple[tuple[int, float], ...], ...] = ()
    tokens: list[tuple[int, str]] = field(default_factory=list)
    checkpoint_bytes: int | None = None
    end_us: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False
    first_n: int | None = None
    """Number of its first token among those of the answer, from 1."""


_Counts = tuple[int, int, int]


@dataclass(slots=True)
class LogRequest:
    """One task of a slot, both -1 where the log does not say. first: its first token, sampled from
    the prompt. n_processed: tokens of the prompt that were not in the cache. predicted, drafted,
    accepted, ratio and mean_length as written, rates (by position in the draft): the server's own
    sums, None or empty where not given. speeds: time in milliseconds, tokens so far, tokens per
    second so far and of the last three seconds. statistics: by drafter its drafts, their tokens and
    those accepted, summed over the requests before and this one, and the same before it. is_over:
    the slot is done with it."""

    slot: int
    task: int
    n_prompt: int | None = None
    n_cached: int | None = None
    first: tuple[int, str] | None = None
    first_us: int | None = None
    rounds: list[LogRound] = field(default_factory=list)
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    predicted: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    n_processed: int | None = None
    ratio: str = ""
    mean_length: str = ""
    rates: list[float] | None = None
    speeds: list[tuple[float | None, int, float, float | None]] = field(default_factory=list)
    statistics: dict[str, tuple[_Counts, _Counts | None]] = field(default_factory=dict)
    last_n: int = 0
    n_missing: int = 0
    """Tokens whose lines are missing."""
    is_over: bool = False
    is_broken: bool = False
    """Some entry of it cannot be read: nothing after that is."""
    prompt: LoggedPrompt | None = None
    """What its prompt found in the slot, as far as logged."""

    def is_closed(self, index: int) -> bool:
        """Whether a round is complete with all its tokens."""
        return self.is_over or index < len(self.rounds) - 1

    @property
    def ids(self) -> list[int]:
        """All emitted ids, in order."""
        first = [self.first[0]] if self.first else []
        return first + [token for one in self.rounds for token, _ in one.tokens]


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
        self._reader = reader
        self._waiting: tuple[int, Time, str] | None = None
        """A line that may go on in the next one."""
        self._candidates: list[tuple[int, str]] = []
        """Lines about drafted tokens that are not read yet."""
        self._prompts = PromptLog()
        self._slots: dict[int, _Slot] = {}
        self._current: LogRequest | None = None
        self._impls: list[tuple[str, int, int]] = []
        self._clock = _PhaseClock()
        self._first_us: int | None = None
        self._last_us: int | None = None
        self._counts: dict[str, _Counts] = {}
        self._depth = 0
        self._says_at_once = False
        """Whether rounds are written before their tokens; what names them later repeats them."""

    def add(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """The next line; it may go on with the one before it, which a token's text has cut. Returns
        the log that takes the lines that follow: a new one where a process began."""
        if self._waiting is not None:
            return self._go_on(number, time, message, is_head)
        if not is_head and message is not None and len(message) < SHORTEST_LINE:
            return self
        if message is None:
            self._bad(number, "it is not valid JSON")
        elif message[-13:] == " draft tokens" and self._light(time, message):
            pass
        elif message.rstrip()[-1:] == "'" and "draft candidate" in message:
            if message.rstrip()[-2:] == "''":  # of a text that may begin with a quote
                self._waiting = number, time, message
            else:
                self._candidates.append((number, message))
        elif ("next token:" in message or "draft candidate" in message) and _is_open(message):
            self._waiting = number, time, message
        else:
            return self._take(number, time, message, is_head)
        return self

    def _go_on(self, number: int, time: Time, message: str | None, is_head: bool) -> ServerLog:
        """The line after one whose token may go on."""
        assert self._waiting is not None
        first, at, before = self._waiting
        if not is_head and message is not None and len(before) < LONGEST_LINE:
            self._waiting = first, at, f"{before}\n{message}"
            return self
        self.end()
        return self.add(number, time, message, is_head)

    def end(self) -> None:
        """Nothing more comes of this process for now."""
        if self._waiting is not None:
            (number, time, message), self._waiting = self._waiting, None
            if "draft candidate" in message and message[:4] != "slot":
                self._candidates.append((number, message))
            else:
                self._take(number, time, message, True)
        self._read_candidates()

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

    def _light(self, time: Time, message: str) -> bool:
        """A round of the light form, of which there are millions; False where it is anything else
        than the round after the last one."""
        if not self.is_light or self._clock.is_at_work or (found := _LIGHT.match(message)) is None:
            return False
        number, task, accepted, drafted = map(int, found.groups())
        slot, us = self._slots.get(number), microseconds(time)
        if slot is None or slot.request.task != task or slot.replay or slot.request.is_broken:
            return False
        last = self._last_us
        if accepted > drafted or drafted > LONGEST_DRAFT:
            return False
        if us is not None and (last is None or not last <= us < last + _LONG_US):
            return False
        self._last_us, self._says_at_once, self._current = us, True, slot.request
        one = LogRound(
            None, drafted, accepted, False, "", (), _NO_TOKENS, None, us, _NO_PHASES, True
        )
        slot.round = one
        slot.request.rounds.append(one)
        self._reader.n_rounds += 1
        return True

    def _begins_again(self, us: int | None) -> bool:
        """Whether another process writes: the clock begins again."""
        if us is None or self._last_us is None or us >= self._last_us - _RESTART_US:
            return False
        return len(self._reader.servers) < _MOST_RESTARTS

    def _take(self, line: int, time: Time, message: str, is_head: bool) -> ServerLog:
        """One entry."""
        slot: _Slot | None = None
        us = microseconds(time)
        try:
            if us is not None:
                self._first_us = us if self._first_us is None else self._first_us
                if not -_YEARS_US < us - self._first_us < _YEARS_US:
                    raise OutOfRangeError("its time is years away from that of the first entry")
                self.has_times = True
            is_slots = message[:4] == "slot"
            found = _SLOT.match(message) if is_slots else None
            if found is None and "id_slot=" in message:
                found = _IDS.search(message)
            if found is None:
                is_start = "llama_server: init" in message or _START.match(message) is not None
                if is_start and self.requests:
                    return self._reader.restarted(self).add(line, time, message, is_head)
                self.is_whole |= is_start
                self._of_server(line, us, message)
                return self
            number, task = int(found[1]), int(found[2])
            said = message[found.end() :] if is_slots else message
            if task < 0:
                self._prompts.take(number, task, said)
                self._clock.mark(us, message)
            else:
                if task > COUNT:
                    raise OutOfRangeError(f"task {task} is more than {COUNT:,}")
                if self.requests and self._begins_again(us):
                    return self._reader.restarted(self).add(line, time, message, is_head)
                slot = self._slot(number, task)
                self._last_us = us
                prompt = self._prompts.take(number, task, said)
                slot.request.prompt = prompt or slot.request.prompt
                if not slot.request.is_broken:
                    self._of_slot(line, us, slot, said)
        except OutOfRangeError as error:
            self._bad(line, str(error))
            if slot is not None:
                slot.request.is_broken = True
                if slot.request.rounds and not slot.request.rounds[-1].is_complete:
                    slot.request.rounds.pop()
        return self

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

    def _not_taken(self, line: int, message: str) -> None:
        """A line that nothing was made of."""
        if (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
        elif _LOOKS_LIKE.search(message, 0, _LOOKED_AT) if _may_look_like(message) else False:
            self._unread(line, repr(message[:_SHOWN]))

    def _add_inner(self, line: int, inner: re.Match[str]) -> None:
        if self._depth < _DEEPEST:
            self._depth += 1
            self.add(line, inner, inner.string[inner.end() :], True)
            self._depth -= 1

    @staticmethod
    def _inner(message: str) -> re.Match[str] | None:
        """The time of an entry within a line: some messages have no end, so that one follows."""
        return STAMP.search(message, 0, LONGEST_LINE) if may_have_stamp(message) else None

    def _of_server(self, line: int, us: int | None, message: str) -> None:
        self._prompts.server(message)
        if message[:4] not in _OWN and (inner := self._inner(message)) is not None:
            self._add_inner(line, inner)
        elif "called impl" in message and (found := _IMPL.search(message)) is not None:
            self._clock.mark(us, message)
            impl = found[1][:100], whole(found[2]), whole(found[3])
            self._impls = [*self._impls[-63:], impl]
        elif "adding speculative" in message:
            found = _IMPLEMENTATION.search(message)
            if found is not None and len(self.drafters) < _MOST_DRAFTERS:
                self.drafters.append(found[1])
        elif "loading model" in message and (found := _MODEL.search(message)) is not None:
            self.model = file_name(found[1])
        elif not self.build and "build" in message and (found := _BUILD.search(message)):
            self.build = found[1]
        elif "n_rs_seq" in message and (found := _PLANES.search(message)) is not None:
            n_rs_seq = whole(found[1], LONGEST_DRAFT)
            self.n_rs_seq = n_rs_seq if self.n_rs_seq is None else self.n_rs_seq
        elif "synthetic speculative acceptance is enabled" in message:
            self.is_synthetic = True
        elif "statistics" in message and "#calls" in message:
            self._statistics(line, message)
        elif "eval time" in message or "draft acceptance" in message or " per pos" in message:
            self._bare_sums(line, message)
        else:
            self._clock.mark(us, message)
            self._not_taken(line, message)

    def _slot(self, number: int, task: int) -> _Slot:
        """The slot, at work for a task."""
        slot = self._slots.get(number)
        if slot is None or slot.request.task != task:
            if slot is not None:
                slot.request.is_over = True
            slot = self._slots[number] = _Slot(self._request(number, task))
        self._current = slot.request
        return slot

    def _request(self, number: int, task: int) -> LogRequest:
        request = LogRequest(number, task)
        self._reader.joins(request)
        self.requests.append(request)
        return request

    def _of_slot(self, line: int, us: int | None, slot: _Slot, said: str) -> None:
        request = slot.request
        if said[:5] == "n_gen" or said[:9] == "n_decoded":
            if (found := _quoted(_TOKEN, said)) is not None:
                self.is_light = False
                number = whole(found[1], MOST_TOKENS)
                self._token(line, slot, us, number, (whole(found[2]), _inside(found)))
            elif (found := _SPEED.match(said)) is not None:
                self._speed(request, us, found)
            else:
                self._not_taken(line, said)
        elif (
            said[:8] == "accepted"
            and (found := _ACCEPTED.match(said)) is not None
            and (found[3] or found[4] or not said[found.end() :].strip())
        ):
            drafted = whole(found[2], LONGEST_DRAFT)
            counts = whole(found[1], drafted or LONGEST_DRAFT), drafted
            if not found[4]:
                self._says_at_once = True
                self._accepted(slot, us, *counts, bool(found[3]))
            elif not self._says_at_once:  # a build that says it in these words alone
                if drafted < counts[0]:  # some say 0 drafted of all rounds
                    self._not_taken(line, said)
                else:
                    self._accepted(slot, us, *counts, restores=False)
        elif "generate_draft" in said and (found := _GENERATE.search(said)) is not None:
            drafted = whole(found[2], LONGEST_DRAFT)
            history, pos = whole(found[1]), whole(found[3], MOST_TOKENS)
            if not slot.replay:
                self._begin(slot, history, drafted, pos)
            self._clock.joins(slot.round)
        elif "slot decode" in said and (found := _DECODE.search(said)) is not None:
            slot.round = LogRound(whole(found[1], MOST_TOKENS), 0)
            self._reader.n_rounds += 1
            request.rounds.append(slot.round)
            slot.round.is_complete = True
            self._clock.joins(slot.round)
        elif "created spec" in said and (found := _CREATED.search(said)) is not None:
            slot.checkpoint_bytes = round(real(found[1], LARGEST >> 20) * 2**20)
            self._clock.mark(us, said)
        elif "restoring" in said and (found := _RESTORING.search(said)) is not None:
            size = whole(found[1], LARGEST)
            if slot.round is not None:
                slot.round.checkpoint_bytes = size
        elif "new prompt" in said and (found := _PROMPT.search(said)) is not None:
            request.n_prompt = whole(found[1], MOST_PROMPT_TOKENS)
        elif "n_tokens" in said and (found := _CACHED.match(said)) is not None:
            n_cached = whole(found[1] or found[2], MOST_PROMPT_TOKENS)
            if request.n_cached is None:  # later parts of the prompt say it again
                request.n_cached = n_cached
        elif said.startswith("stop processing"):
            request.is_over = True
        elif "eval time" in said or "draft acceptance" in said or " per pos" in said:
            if not self._sums(request, said):
                self._not_taken(line, said)
        else:
            self._clock.mark(us, said)
            self._not_taken(line, said)

    def _begin(self, slot: _Slot, history: int, drafted: int, pos: int) -> None:
        self._read_candidates()
        one = slot.round = LogRound(pos, drafted)
        self._reader.n_rounds += 1
        slot.request.rounds.append(one)
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

    def _read_candidates(self) -> None:
        """Read the lines about drafted tokens since the last time."""
        lines, self._candidates = self._candidates, []
        for line, message in lines:
            found = _CANDIDATE.search(message)
            if found is None:
                self._not_taken(line, message)
                continue
            try:
                number, rank, at, token = (whole(found[i]) for i in range(1, 5))
                p = min(real(found[5]), 1.0)
            except OutOfRangeError as error:
                self._bad(line, str(error))
                continue
            slot = self._slots.get(number)
            if slot is not None and rank < 8 and at < LONGEST_DRAFT:
                if not rank and not at:
                    slot.candidates = {}
                slot.candidates.setdefault(at, {})[rank] = (token, p)
                if token not in self.pieces:
                    self._learn(token, _inside(found))

    def _accepted(
        self, slot: _Slot, us: int | None, accepted: int, drafted: int, restores: bool
    ) -> None:
        if slot.replay and not restores:
            slot.replay = False  # the counts are those of the replay
            if slot.round is not None:
                slot.round.is_complete, slot.round.end_us = True, us
                self._clock.ends(slot.round, us)
            return
        if slot.round is None or slot.round.is_complete or self.is_light:
            slot.round = LogRound(None, drafted)
            self._reader.n_rounds += 1
            slot.request.rounds.append(slot.round)
        one = slot.round
        one.drafted, one.accepted, one.restored, one.end_us = drafted, accepted, restores, us
        self._clock.ends(one, us)
        slot.replay, one.is_complete = restores, not restores

    def _token(
        self, line: int, slot: _Slot, us: int | None, number: int, token: tuple[int, str]
    ) -> None:
        request = slot.request
        self._learn(*token)
        if number <= request.last_n:
            return  # a line that was copied twice
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
            if one.tokens is _NO_TOKENS:
                one.tokens = []
            if one.first_n is None:
                one.first_n = number
            elif n_missing and len(one.tokens) + n_missing <= one.accepted + 1:
                one.tokens += [UNKNOWN_TOKEN] * n_missing
            one.tokens.append(token)
            if one.end_us is None and us is not None:
                one.end_us = us
                self._clock.ends(one, us)

    def _learn(self, token_id: int, text: str) -> None:
        if text and token_id not in self.pieces and "\ufffd" not in text:
            self.pieces[token_id] = text.encode("utf-8", "replace")

    def _speed(self, request: LogRequest, us: int | None, found: re.Match[str]) -> None:
        if len(request.speeds) >= _MOST_SPEEDS:  # of a long answer every second, and so on
            del request.speeds[1::2]
        recent = None if found[3] is None else real(found[3])
        at_ms = None if us is None else us / 1e3
        request.speeds.append((at_ms, whole(found[1], MOST_TOKENS), real(found[2]), recent))

    def _sums(self, request: LogRequest, said: str) -> bool:
        """Take sums of a request from a line; whether it has any."""
        if (found := _PROMPT_TIME.search(said)) is not None:
            request.prompt_ms = real(found[1])
            n = request.n_processed = whole(found[2], MOST_PROMPT_TOKENS)
            if request.n_prompt is None and request.n_cached is not None:
                request.n_prompt = request.n_cached + n
            return True
        if (found := _EVAL_TIME.search(said)) is not None:
            request.predicted_ms, request.predicted = real(found[1]), whole(found[2], MOST_TOKENS)
            request.is_over = True
            return True
        has_sums = (found := _SUMS.search(said)) is not None
        if found is not None:
            drafted = whole(found[3], MOST_TOKENS)
            request.accepted, request.drafted = whole(found[2], drafted), drafted
            request.ratio = found[1]
        if (mean := _MEAN.search(said)) is not None:
            request.mean_length = mean[1]
        if (rates := _BY_POSITION.search(said)) is not None:
            values = rates[1].split(",")
            if len(values) > LONGEST_DRAFT:
                raise OutOfRangeError(f"{len(values):,} positions are more than {LONGEST_DRAFT:,}")
            request.rates = [real(one.strip(), 1.0) for one in values if one.strip()]
        return has_sums or mean is not None or rates is not None

    def _bare_sums(self, line: int, said: str) -> None:
        """Sums without a slot: of the slot that the line before names, or of a request that the
        log does not show otherwise."""
        request = self._current
        is_new = request is None or (
            request.prompt_ms is not None or request.predicted is not None
            if "prompt eval" in said
            else request.predicted is not None
            if "eval time" in said
            else request.drafted is not None and "generated)" in said
        )
        if is_new:
            if not (_PROMPT_TIME.search(said) or _EVAL_TIME.search(said) or _SUMS.search(said)):
                self._not_taken(line, said)
                return
            request = self._current = self._request(-1, -1)
        assert request is not None
        if request.is_broken or not self._sums(request, said):
            self._not_taken(line, said)

    def _statistics(self, line: int, message: str) -> None:
        """Sums of a drafter over all requests so far, written after those of one."""
        if (found := _STATISTICS.search(message)) is None:
            self._not_taken(line, message)
            return
        drafts, tokens, accepted = (whole(found[i]) for i in range(2, 5))
        name, now = found[1], (drafts, tokens, accepted)
        if len(self._counts) < _MOST_DRAFTERS or name in self._counts:
            if self._current is not None:
                self._current.statistics[name] = now, self._counts.get(name)
            self._counts[name] = now


class LogReader:
    """Reads a log as it grows. servers: the processes that wrote it, each with what it wrote.
    requests: of all of them, in the order in which their tasks began."""

    def __init__(
        self,
        others: Callable[[int, str, str], bool] | None = None,
        fold: Callable[[ServerLog], int] | None = None,
    ) -> None:
        """others: takes lines of other engines, see `LogLines`. fold: where there are more requests
        than a trace can hold, makes room among those of a server; returns for how many."""
        self.requests: list[LogRequest] = []
        self.servers: list[ServerLog] = []
        self._lines, self._fold = LogLines(others), fold
        self.n_rounds = 0
        self._by_stream: dict[str, ServerLog] = {}

    def feed(self, text: str) -> None:
        """More of the log, cut anywhere. Raises TraceFileError for more than a trace can hold."""
        self._take(self._lines.feed(text))

    def _take(self, lines: Iterable[LogLine]) -> None:
        by_stream = self._by_stream
        for stream, number, time, message, is_head in lines:
            server = by_stream.get(stream)
            if server is None:
                server = by_stream[stream] = self._server(stream)
            by_stream[stream] = server.add(number, time, message, is_head)
        if self.n_rounds > MOST_ROUNDS:
            raise TraceFileError(
                f"The log has more than {MOST_ROUNDS:,} rounds.", "Cut it into several files."
            )

    def end(self) -> None:
        """Nothing more comes: the last entry is complete, unless the server ended in it."""
        known = {one: one.known_unread for one in self.servers}
        self._take(self._lines.end())
        for server in self._by_stream.values():
            server.end()
            if self._lines.is_cut and server in known:
                server.known_unread = known[server]

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


def _may_look_like(message: str) -> bool:
    """Whether a message has a word that one has that _LOOKS_LIKE finds."""
    return (
        "n_gen =" in message
        or "n_decoded =" in message
        or "accepted " in message
        or "draft " in message
        or "eval time" in message
        or "#gen " in message
    )


def _is_open(message: str) -> bool:
    """Whether the text of a token may go on in the next line: no quote ends it, or one that it may
    begin with."""
    found = _TOKEN.search(message) or _CANDIDATE.search(message)
    text = message[found.end() :].rstrip() if found is not None else "'"
    return found is not None and (text == "'" or not text.endswith("'"))


def _quoted(head: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The head of a text that goes on to a quote at its end; None unless both are there."""
    found = head.search(text)
    return found if found and text[found.end() :].rstrip().endswith("'") else None


def _inside(found: re.Match[str]) -> str:
    """What follows a head, up to the quote at the end."""
    return found.string[found.end() :].rstrip()[:-1]


def file_name(path: str) -> str:
    """The last part of a path of any system."""
    return re.split(r"[\\/]", path)[-1]


class _PhaseClock:
    """Splits the time of the server's iterations into phases, shared by the slots in one."""

    def __init__(self) -> None:
        self._rounds: list[LogRound] = []
        self._at: dict[str, int] = {}
        self._n_yielded = 0

    @property
    def is_at_work(self) -> bool:
        """Whether the log tells of phases."""
        return bool(self._at)

    def mark(self, us: int | None, message: str) -> None:
        """An entry that begins or ends a phase."""
        if us is None:
            return
        if message[-12:] == "update slots":
            self._rounds, self._at, self._n_yielded = [], {}, 0
        elif "max possible draft" in message:
            self._at.setdefault("draft", us)
        elif "called impl" in message:
            self._at["drafted"] = us
        elif "created speculative checkpoint" in message:
            self._at["saved"] = us
        elif "n_batch (effective)" in message:
            self._at["verify"], self._n_yielded = us, 0
        elif "done yielding" in message and "verify" in self._at:
            self._n_yielded += 1
            self._at["verified" if self._n_yielded == 1 else "kept"] = us

    def joins(self, one: LogRound | None) -> None:
        """A round is verified, or replayed, in this iteration."""
        if one is not None:
            self._rounds.append(one)

    def ends(self, one: LogRound, us: int | None) -> None:
        """A round's verification or replay is complete."""
        at, n = self._at, len(self._rounds)
        if us is None or not n or "verified" not in at:
            return
        spans = {
            "verify": ("verify", "verified"),
            "draft": ("draft", "drafted"),
            "save": ("drafted", "saved"),
        }
        if one.phases:  # the replay
            spans = {"replay": ("verify", "verified")}
        for phase, (begin, end) in spans.items():
            if begin in at and end in at and at[begin] <= at[end]:
                one.phases[phase] = (at[end] - at[begin]) / 1e3 / n
        kept = at.get("kept", at["verified"])
        one.phases["draft"] = one.phases.get("draft", 0.0) + max(kept - at["verified"], 0) / 1e3 / n
        one.phases["sample"] = one.phases.get("sample", 0.0) + max(us - kept, 0) / 1e3 / n


_SIGNS = re.compile(
    r"(?:^|[^\d.])\d{1,9}\.\d\d\.\d{3}\.\d{3} [IWEDC] "
    r"|slot {1,20}[\w():~]{1,32}: id {1,40}\d{1,9} \| task |llama_server: "
    r"|eval time {0,8}= {1,20}[\d.]{1,20} ms /|draft acceptance(?: rate)? {0,8}= "
    r"|statistics {1,40}\S{1,64}: #calls"
)


def has_entries(text: str) -> bool:
    """Whether a text has what only a llama-server's log has."""
    return _SIGNS.search(text) is not None
