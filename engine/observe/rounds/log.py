"""Rounds told by the log of a llama-server, at `-lv 5` with LLAMA_TRACE=1, or at the default
verbosity with LLAMA_TRACE=1 alone (the light form)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.errors import TraceFileError

_MOST_ENTRY = 16 << 20
_MOST_COUNT = 2**31 - 1
_STAMP = re.compile(r"(\d{1,9})\.(\d\d)\.(\d{3})\.(\d{3}) ([IWEDC]) ")
_COLOUR = re.compile("\x1b\\[")
_NO_TIMES = TraceFileError(
    "The log has no times of its entries, or colours in them.",
    "Start the server with --log-file, --log-prefix and --log-timestamps, or with --log-jsonl.",
)
_SLOT = re.compile(r"slot .{1,20}?: id\s+(\d+) \| task (-?\d+) \| ")
_CANDIDATE = re.compile(
    r"- seq_id (\d+), draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\) '(.*)'\s*$",
    re.DOTALL,
)
_IMPL = re.compile(r"called impl (\S+), hist size = (\d+), call_count = \d+, gen = (\d+)")
_IMPLEMENTATION = re.compile(r"adding speculative implementation '([^']+)'")
_GENERATE = re.compile(r"generate_draft: id=-?\d+, #tokens=(\d+), #draft=(\d+), pos_next=(\d+)")
_DECODE = re.compile(r"slot decode token, id=-?\d+,.* n_tokens = (\d+)")
_CREATED = re.compile(r"created speculative checkpoint \(.* size = ([\d.]+) MiB")
_RESTORING = re.compile(r"restoring speculative checkpoint \(.* size = (\d+)\)")
_ACCEPTED = re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens( \(restore checkpoint\))?\s*$")
_TOKEN = re.compile(
    r"n_gen = (\d+), n_remaining = -?\d+, next token:\s+(\d+) '(.*)'\s*$", re.DOTALL
)
_PROMPT = re.compile(r"new prompt, .*task\.n_tokens = (\d+)")
_CACHED = re.compile(r"cached n_tokens = (\d+)")
_PROMPT_TIME = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
_EVAL_TIME = re.compile(r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
_SUMS = re.compile(r"draft acceptance = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)")
_MODEL = re.compile(r"load_model: loading model '([^']+)'")
_BUILD = re.compile(r"build(?:_info)?\s*[:=]\s*(\S+)")
_PLANES = re.compile(r"llama_context: n_rs_seq\s+= (\d+)")


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A token that a drafter proposed. tops: ids and probabilities of its candidates, the
    proposed one first."""

    token_id: int
    p: float
    tops: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class LogRound:
    """One verification. pos: position of its first token; None in the light form. drafted: tokens,
    of which `draft` tells as many as a drafter with a model had. tokens: emitted ids with their
    text. end_us: on the server's clock, None without times. phases: milliseconds by phase."""

    pos: int | None
    drafted: int
    accepted: int = 0
    restored: bool = False
    drafter: str = ""
    draft: tuple[DraftedToken, ...] = ()
    tokens: list[tuple[int, str]] = field(default_factory=list)
    checkpoint_bytes: int | None = None
    end_us: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(slots=True)
class LogRequest:
    """One task of a slot. first: its first token, sampled from the prompt. predicted, drafted,
    accepted: the server's own sums, None where not told. is_over: the slot is done with it."""

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
    is_over: bool = False

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
    """What is going on in a slot. replay: a restore was told and its replay has not ended."""

    request: LogRequest
    round: LogRound | None = None
    candidates: dict[int, dict[int, tuple[int, float]]] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    replay: bool = False


class LogReader:
    """Reads a log as it grows. requests: in the order in which their tasks began."""

    def __init__(self) -> None:
        self.requests: list[LogRequest] = []
        self.pieces: dict[int, bytes] = {}
        """Of tokens that were drafted or emitted, as far as they are whole characters."""
        self.n_rs_seq: int | None = None
        self.drafters: list[str] = []
        self.is_synthetic = False
        self.is_light = True
        self.model = ""
        """The model's file, by its name."""
        self.build = ""
        self._entries = _Entries()
        self._slots: dict[int, _Slot] = {}
        self._impls: list[tuple[str, int, int]] = []
        self._clock = _PhaseClock()

    def feed(self, text: str) -> None:
        """More of the log, cut anywhere. Raises TraceFileError for a form that cannot be read."""
        for time_us, message in self._entries.feed(text):
            self._take(time_us, message)

    def end(self) -> None:
        """Nothing more comes: the last entry is complete."""
        for time_us, message in self._entries.end():
            self._take(time_us, message)

    def _take(self, us: int | None, message: str) -> None:
        if (found := _SLOT.search(message)) is not None:
            slot, task = int(found[1]), int(found[2])
            if task >= 0 and slot <= _MOST_COUNT:
                self._of_slot(us, slot, task, message[found.end() :])
            self._clock.mark(us, message)
        elif "draft candidate" in message:
            self._candidate(message)
        elif (found := _IMPL.search(message)) is not None:
            self._clock.mark(us, message)
            self._impls = [*self._impls[-63:], (found[1], int(found[2]), int(found[3]))]
        elif (found := _IMPLEMENTATION.search(message)) is not None:
            self.drafters.append(found[1])
        elif (found := _MODEL.search(message)) is not None:
            self.model = file_name(found[1])
        elif not self.build and (found := _BUILD.search(message)) is not None:
            self.build = found[1]
        elif (found := _PLANES.search(message)) is not None:
            self.n_rs_seq = int(found[1]) if self.n_rs_seq is None else self.n_rs_seq
        elif "synthetic speculative acceptance is enabled" in message:
            self.is_synthetic = True
        else:
            self._clock.mark(us, message)

    def _of_slot(self, us: int | None, number: int, task: int, said: str) -> None:
        slot = self._slots.get(number)
        if slot is None or slot.request.task != task:
            if slot is not None:
                slot.request.is_over = True
            slot = self._slots[number] = _Slot(LogRequest(number, task))
            self.requests.append(slot.request)
        request = slot.request
        if (found := _TOKEN.search(said)) is not None:
            self.is_light = False
            self._token(slot, us, int(found[1]), (int(found[2]), found[3]))
        elif (found := _ACCEPTED.match(said)) is not None:
            self._accepted(slot, us, int(found[1]), int(found[2]), bool(found[3]))
        elif (found := _GENERATE.search(said)) is not None:
            if not slot.replay:
                self._begin(slot, int(found[1]), int(found[2]), int(found[3]))
            self._clock.joins(slot.round)
        elif (found := _DECODE.search(said)) is not None:
            slot.round = LogRound(int(found[1]), 0)
            request.rounds.append(slot.round)
            slot.round.is_complete = True
            self._clock.joins(slot.round)
        elif (found := _CREATED.search(said)) is not None:
            slot.checkpoint_bytes = round(float(found[1]) * 2**20)
        elif (found := _RESTORING.search(said)) is not None:
            if slot.round is not None:
                slot.round.checkpoint_bytes = int(found[1])
        elif (found := _PROMPT.search(said)) is not None:
            request.n_prompt = int(found[1])
        elif (found := _CACHED.match(said)) is not None:
            if request.n_cached is None:  # later parts of the prompt say it again
                request.n_cached = int(found[1])
        elif said.startswith("stop processing"):
            request.is_over = True
        elif "draft acceptance" in said or "eval time" in said:
            self._sums(request, said)

    def _begin(self, slot: _Slot, history: int, drafted: int, pos: int) -> None:
        one = slot.round = LogRound(pos, drafted)
        slot.request.rounds.append(one)
        one.checkpoint_bytes, slot.checkpoint_bytes = slot.checkpoint_bytes, None
        for i, (name, size, n) in enumerate(self._impls):
            # a draft may be cut behind the drafter, never lengthened
            if size == history and n >= drafted:
                one.drafter = name
                del self._impls[i]
                break
        tops = [slot.candidates.get(i, {}) for i in range(drafted)]
        if tops and all(0 in top for top in tops) and "ngram" not in one.drafter:
            one.draft = tuple(
                DraftedToken(*top[0], tuple(top[k] for k in sorted(top))) for top in tops
            )
        slot.candidates = {}

    def _candidate(self, message: str) -> None:
        if (found := _CANDIDATE.search(message)) is None:
            return
        slot = self._slots.get(int(found[1]))
        rank, at, token = int(found[2]), int(found[3]), int(found[4])
        if slot is not None and rank < 8 and at < 1024 and token <= _MOST_COUNT:
            if not rank and not at:
                slot.candidates = {}
            slot.candidates.setdefault(at, {})[rank] = (token, min(float(found[5]), 1.0))
            self._learn(token, found[6])

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
            slot.request.rounds.append(slot.round)
        one = slot.round
        one.drafted, one.accepted, one.restored, one.end_us = drafted, accepted, restores, us
        self._clock.ends(one, us)
        slot.replay, one.is_complete = restores, not restores

    def _token(self, slot: _Slot, us: int | None, number: int, token: tuple[int, str]) -> None:
        if token[0] > _MOST_COUNT:
            return
        self._learn(*token)
        if number == 1:
            slot.request.first, slot.request.first_us = token, us
        elif slot.round is not None:
            slot.round.tokens.append(token)
            if slot.round.end_us is None and us is not None:
                slot.round.end_us = us
                self._clock.ends(slot.round, us)

    def _learn(self, token_id: int, text: str) -> None:
        if text and token_id not in self.pieces and "\ufffd" not in text:
            self.pieces[token_id] = text.encode("utf-8", "replace")

    def _sums(self, request: LogRequest, said: str) -> None:
        if (found := _PROMPT_TIME.search(said)) is not None:
            request.prompt_ms = float(found[1])
            if request.n_prompt is None and request.n_cached is not None:
                request.n_prompt = request.n_cached + int(found[2])
        elif (found := _EVAL_TIME.search(said)) is not None:
            request.predicted_ms, request.predicted = float(found[1]), int(found[2])
        elif (found := _SUMS.search(said)) is not None:
            request.accepted, request.drafted = int(found[1]), int(found[2])


def file_name(path: str) -> str:
    """The last part of a path of any system."""
    return re.split(r"[\\/]", path)[-1]


class _PhaseClock:
    """Splits the time of the server's iterations into phases, shared by the slots in one."""

    def __init__(self) -> None:
        self._rounds: list[LogRound] = []
        self._at: dict[str, int] = {}
        self._n_yielded = 0

    def mark(self, us: int | None, message: str) -> None:
        """An entry that begins or ends a phase."""
        if us is None:
            return
        if message.endswith("start_loop: update slots"):
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
        one.phases["draft"] = one.phases.get("draft", 0.0) + (kept - at["verified"]) / 1e3 / n
        one.phases["sample"] = one.phases.get("sample", 0.0) + max(us - kept, 0) / 1e3 / n


class _Entries:
    """Cuts a log into entries: one JSON object per line, or text that begins at a time."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_json: bool | None = None
        self._n_seen = 0

    def feed(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Time in microseconds and message of the entries that this completes."""
        self._rest += text
        if self._is_json is None and (start := self._rest.lstrip()):
            self._is_json = start.startswith("{")
        if self._is_json:
            *lines, self._rest = self._rest.split("\n")
            for line in lines:
                yield from _json_entry(line)
        else:
            yield from self._texts(last=False)
        if len(self._rest) > _MOST_ENTRY:
            raise TraceFileError(
                f"The log has an entry of more than {_MOST_ENTRY >> 20} MiB.",
                "Name the log that a llama-server wrote.",
            )

    def end(self) -> Iterator[tuple[int | None, str]]:
        """The entry that was still open."""
        if self._is_json:
            yield from _json_entry(self._rest)
        elif self._is_json is False:
            yield from self._texts(last=True)
        self._rest = ""

    def _texts(self, *, last: bool) -> Iterator[tuple[int | None, str]]:
        stamps = list(_STAMP.finditer(self._rest))
        if not stamps:
            self._n_seen += len(self._rest)
            if (
                _COLOUR.search(self._rest)
                or self._n_seen > 1 << 16
                or (last and self._rest.strip())
            ):
                raise _NO_TIMES
            return
        self._n_seen = -_MOST_ENTRY
        ends = [one.start() for one in stamps[1:]] + [len(self._rest)]
        for stamp, end in list(zip(stamps, ends, strict=True))[: None if last else -1]:
            yield _microseconds(stamp), self._rest[stamp.end() : end].rstrip("\n")
        self._rest = self._rest[stamps[-1].start() :]


def _json_entry(line: str) -> Iterator[tuple[int | None, str]]:
    if not line.strip():
        return
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return  # a line that was cut when the server ended
    if isinstance(entry, dict) and isinstance(entry.get("msg"), str):
        time = entry.get("time")
        is_time = isinstance(time, int) and 0 < time < 2**53
        yield time if is_time else None, entry["msg"].rstrip("\n")


def _microseconds(stamp: re.Match[str]) -> int:
    minutes, seconds, ms, us = (int(stamp[i]) for i in range(1, 5))
    return ((minutes * 60 + seconds) * 1000 + ms) * 1000 + us


def is_log(head: bytes) -> bool:
    """Whether a file's first bytes may be those of a log."""
    text = head[:4096].decode("utf-8", "replace").lstrip()
    is_ours = text.startswith('{"type":"log"') or _STAMP.match(text) is not None
    # one that cannot be read is still to be told how the server is to be started
    return is_ours or (not text.startswith("{") and "llama_server: " in text)
