"""Rounds read from the log of a llama-server, at `-lv 5` with LLAMA_TRACE=1, or at the default
verbosity with LLAMA_TRACE=1 alone (the light form)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.errors import TraceFileError
from engine.foreign_json import JsonError, parse_json
from engine.foreign_numbers import (
    LARGEST,
    LONGEST_DRAFT,
    LONGEST_MS,
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    OutOfRangeError,
    is_whole,
    real,
    whole,
)
from engine.observe.rounds.log_prompts import LoggedPrompt, PromptLog

_MOST_LINE = 16 << 20
"""Characters of a line of JSON."""
_LONGEST_ENTRY = 1 << 14
"""Characters of an entry that are looked at; what is read of one takes some hundred."""
_LONGEST_STAMP = 32
MOST_REQUESTS = 1 << 16
_MOST_DRAFTERS = 64
# In none of these may what is repeated begin in several places of a text and run to its end: gaps
# are bounded, and what ends a text is looked for from its end.
_STAMP = re.compile(r"(\d{1,9})\.(\d\d)\.(\d{3})\.(\d{3}) ([IWEDC]) ", re.ASCII)
_COLOUR = re.compile("\x1b\\[")
_NO_TIMES = TraceFileError(
    "The log has no times of its entries, or colours in them.",
    "Start the server with --log-file, --log-prefix and --log-timestamps, or with --log-jsonl.",
)
_SLOT = re.compile(r"slot .{1,20}?: id\s{1,40}+(\d+) \| task (-?\d+) \| ")
_CANDIDATE = re.compile(
    r"- seq_id (\d+), draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([\d.]+)\) '"
)
_IMPL = re.compile(r"called impl (\S+), hist size = (\d+), call_count = \d+, gen = (\d+)")
_IMPLEMENTATION = re.compile(r"adding speculative implementation '([^']{1,200})'")
_GENERATE = re.compile(r"generate_draft: id=-?\d+, #tokens=(\d+), #draft=(\d+), pos_next=(\d+)")
_DECODE = re.compile(r"slot decode token, id=-?\d+,.{0,200} n_tokens = (\d+)")
_CREATED = re.compile(r"created speculative checkpoint \(.{0,400} size = ([\d.]+) MiB")
_RESTORING = re.compile(r"restoring speculative checkpoint \(.{0,400} size = (\d+)\)")
_ACCEPTED = re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens( \(restore checkpoint\))?\s*$")
_TOKEN = re.compile(r"n_gen = (\d+), n_remaining = -?\d+, next token:\s+(\d+) '")
_PROMPT = re.compile(r"new prompt, .{0,200}task\.n_tokens = (\d+)")
_CACHED = re.compile(r"cached n_tokens = (\d+)")
_PROMPT_TIME = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
_EVAL_TIME = re.compile(r"(?<!prompt )eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
_SUMS = re.compile(r"draft acceptance = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)")
_MODEL = re.compile(r"load_model: loading model '([^']{1,4096})'")
_BUILD = re.compile(r"build(?:_info)?\s*[:=]\s*(\S{1,200})")
_PLANES = re.compile(r"llama_context: n_rs_seq\s+= (\d+)")


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


@dataclass(slots=True)
class LogRequest:
    """One task of a slot. first: its first token, sampled from the prompt. predicted, drafted,
    accepted: the server's own sums, None where not given. is_over: the slot is done with it."""

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
        self.n_unread = 0
        """Entries that cannot be read."""
        self.first_unread = ""
        """Where the first of them is, and why."""
        self._prompts = PromptLog()
        self._entries = _Entries()
        self._slots: dict[int, _Slot] = {}
        self._impls: list[tuple[str, int, int]] = []
        self._clock = _PhaseClock()
        self._first_us: int | None = None

    def feed(self, text: str) -> None:
        """More of the log, cut anywhere. Raises TraceFileError for a form that cannot be read."""
        for entry in self._entries.feed(text):
            self._take(*entry)

    def end(self) -> None:
        """Nothing more comes: the last entry is complete, unless the server ended in it."""
        known = self.n_unread, self.first_unread
        for entry in self._entries.end():
            self._take(*entry)
        if self._entries.is_cut:
            self.n_unread, self.first_unread = known

    @property
    def unread(self) -> list[dict[str, Any]]:
        """The finding about entries that cannot be read, as a run keeps it; empty without any."""
        if not self.n_unread:
            return []
        message = (
            "Entries of the log cannot be read; of their requests nothing after them is shown."
        )
        evidence = f"{self.n_unread:,} of them; the first is {self.first_unread}"
        return [{"rule": "log-unread", "message": message, "evidence": evidence}]

    def _take(self, line: int, us: int | None, message: str | None) -> None:
        """One entry; without a message one that is not valid JSON."""
        slot: _Slot | None = None
        try:
            if message is None:
                raise OutOfRangeError("it is not valid JSON")
            if us is not None:
                self._first_us = us if self._first_us is None else self._first_us
                if abs(us - self._first_us) > LONGEST_MS / 2 * 1e3:
                    raise OutOfRangeError("its time is years away from that of the first entry")
            message = message[:_LONGEST_ENTRY]
            if (found := _SLOT.search(message)) is not None:
                task = -1 if found[2].startswith("-") else whole(found[2])
                number = whole(found[1])
                prompt = self._prompts.take(number, task, message[found.end() :])
                if task >= 0:
                    slot = self._slot(number, task)
                    slot.request.prompt = prompt or slot.request.prompt
                    if not slot.request.is_broken:
                        self._of_slot(us, slot, message[found.end() :])
                self._clock.mark(us, message)
            else:
                self._of_server(us, message)
        except OutOfRangeError as error:
            self.n_unread += 1
            self.first_unread = self.first_unread or f"line {line}: {error}"
            if slot is not None:
                slot.request.is_broken = True
                if slot.request.rounds and not slot.request.rounds[-1].is_complete:
                    slot.request.rounds.pop()

    def _of_server(self, us: int | None, message: str) -> None:
        self._prompts.server(message)
        if "draft candidate" in message:
            self._candidate(message)
        elif (found := _IMPL.search(message)) is not None:
            self._clock.mark(us, message)
            impl = found[1][:100], whole(found[2]), whole(found[3])
            self._impls = [*self._impls[-63:], impl]
        elif (found := _IMPLEMENTATION.search(message)) is not None:
            if len(self.drafters) < _MOST_DRAFTERS:
                self.drafters.append(found[1])
        elif (found := _MODEL.search(message)) is not None:
            self.model = file_name(found[1])
        elif not self.build and (found := _BUILD.search(message)) is not None:
            self.build = found[1]
        elif (found := _PLANES.search(message)) is not None:
            n_rs_seq = whole(found[1], LONGEST_DRAFT)
            self.n_rs_seq = n_rs_seq if self.n_rs_seq is None else self.n_rs_seq
        elif "synthetic speculative acceptance is enabled" in message:
            self.is_synthetic = True
        else:
            self._clock.mark(us, message)

    def _slot(self, number: int, task: int) -> _Slot:
        """The slot, at work for a task."""
        slot = self._slots.get(number)
        if slot is None or slot.request.task != task:
            if len(self.requests) >= MOST_REQUESTS:
                raise TraceFileError(
                    f"The log tells of more than {MOST_REQUESTS:,} requests.",
                    "Cut it into several files.",
                )
            if slot is not None:
                slot.request.is_over = True
            slot = self._slots[number] = _Slot(LogRequest(number, task))
            self.requests.append(slot.request)
        return slot

    def _of_slot(self, us: int | None, slot: _Slot, said: str) -> None:
        request = slot.request
        if (found := _quoted(_TOKEN, said)) is not None:
            self.is_light = False
            token = whole(found[2]), _inside(found)
            self._token(slot, us, whole(found[1], MOST_TOKENS), token)
        elif (found := _ACCEPTED.match(said)) is not None:
            drafted = whole(found[2], LONGEST_DRAFT)
            self._accepted(slot, us, whole(found[1], drafted), drafted, bool(found[3]))
        elif (found := _GENERATE.search(said)) is not None:
            drafted = whole(found[2], LONGEST_DRAFT)
            history, pos = whole(found[1]), whole(found[3], MOST_TOKENS)
            if not slot.replay:
                self._begin(slot, history, drafted, pos)
            self._clock.joins(slot.round)
        elif (found := _DECODE.search(said)) is not None:
            slot.round = LogRound(whole(found[1], MOST_TOKENS), 0)
            request.rounds.append(slot.round)
            slot.round.is_complete = True
            self._clock.joins(slot.round)
        elif (found := _CREATED.search(said)) is not None:
            slot.checkpoint_bytes = round(real(found[1], LARGEST >> 20) * 2**20)
        elif (found := _RESTORING.search(said)) is not None:
            size = whole(found[1], LARGEST)
            if slot.round is not None:
                slot.round.checkpoint_bytes = size
        elif (found := _PROMPT.search(said)) is not None:
            request.n_prompt = whole(found[1], MOST_PROMPT_TOKENS)
        elif (found := _CACHED.match(said)) is not None:
            n_cached = whole(found[1], MOST_PROMPT_TOKENS)
            if request.n_cached is None:  # later parts of the prompt say it again
                request.n_cached = n_cached
        elif said.startswith("stop processing"):
            request.is_over = True
        elif "draft acceptance" in said or "eval time" in said:
            self._sums(request, said)

    def _begin(self, slot: _Slot, history: int, drafted: int, pos: int) -> None:
        one = slot.round = LogRound(pos, drafted)
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

    def _candidate(self, message: str) -> None:
        if (found := _quoted(_CANDIDATE, message)) is None:
            return
        number, rank, at, token = (whole(found[i]) for i in range(1, 5))
        p, slot = min(real(found[5]), 1.0), self._slots.get(number)
        if slot is not None and rank < 8 and at < LONGEST_DRAFT:
            if not rank and not at:
                slot.candidates = {}
            slot.candidates.setdefault(at, {})[rank] = (token, p)
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
            slot.request.rounds.append(slot.round)
        one = slot.round
        one.drafted, one.accepted, one.restored, one.end_us = drafted, accepted, restores, us
        self._clock.ends(one, us)
        slot.replay, one.is_complete = restores, not restores

    def _token(self, slot: _Slot, us: int | None, number: int, token: tuple[int, str]) -> None:
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
            request.prompt_ms, n = real(found[1]), whole(found[2], MOST_PROMPT_TOKENS)
            if request.n_prompt is None and request.n_cached is not None:
                request.n_prompt = request.n_cached + n
        elif (found := _EVAL_TIME.search(said)) is not None:
            request.predicted_ms, request.predicted = real(found[1]), whole(found[2], MOST_TOKENS)
        elif (found := _SUMS.search(said)) is not None:
            drafted = whole(found[2], MOST_TOKENS)
            request.accepted, request.drafted = whole(found[1], drafted), drafted


def _quoted(head: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The head of a text that goes on to a quote at its end; None unless both are there."""
    return head.search(text) if text.rstrip().endswith("'") else None


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
        one.phases["draft"] = one.phases.get("draft", 0.0) + max(kept - at["verified"], 0) / 1e3 / n
        one.phases["sample"] = one.phases.get("sample", 0.0) + max(us - kept, 0) / 1e3 / n


class _Entries:
    """Cuts a log into entries: one JSON object per line, or text that begins at a time. Of a long
    text no more is kept than what is looked at."""

    def __init__(self) -> None:
        self._is_json: bool | None = None
        self._line = 1
        self._parts: list[str] = []
        """Of a line of JSON, or what may be the beginning of a time."""
        self._n_rest = 0
        self._entry: tuple[int, int] | None = None
        """Line and time of the open entry of text."""
        self._said = ""
        self.is_cut = False
        """Whether the last line has no end."""

    def feed(self, text: str) -> Iterator[tuple[int, int | None, str | None]]:
        """Line, time in microseconds and message of the entries that this completes; no message
        of what is not valid JSON."""
        if self._is_json is None and (start := text.lstrip()):
            self._is_json = start.startswith("{")
        self.is_cut = not text.endswith("\n") if text else self.is_cut
        if self._is_json:
            yield from self._lines(text)
        else:
            yield from self._texts(text, last=False)

    def end(self) -> Iterator[tuple[int, int | None, str | None]]:
        """The entry that was still open."""
        if self._is_json:
            yield from self._lines("\n")
        elif self._is_json is False:
            yield from self._texts("", last=True)

    def _lines(self, text: str) -> Iterator[tuple[int, int | None, str | None]]:
        self._parts.append(text)
        self._n_rest += len(text)
        if "\n" in text:
            *lines, rest = "".join(self._parts).split("\n")
            self._parts, self._n_rest = [rest], len(rest)
            for line in lines:
                yield from _json_entry(self._line, line)
                self._line += 1
        if self._n_rest > _MOST_LINE:
            raise TraceFileError(
                f"The log's line {self._line} has more than {_MOST_LINE >> 20} MiB.",
                "Name the log that a llama-server wrote.",
            )

    def _texts(self, text: str, *, last: bool) -> Iterator[tuple[int, int | None, str | None]]:
        data = "".join((*self._parts, text))
        at = 0
        for stamp in _STAMP.finditer(data):
            yield from self._add(data[at : stamp.start()], is_end=True)
            self._entry, at = (self._line, _microseconds(stamp)), stamp.end()
        # a time is cut at most once: before this one would have been found
        until = len(data) if last else max(at, len(data) - _LONGEST_STAMP)
        yield from self._add(data[at:until], is_end=last)
        self._parts = [data[until:]]
        if self._entry is None:
            self._n_rest += len(text)
            is_over = last and bool(data.strip())
            if is_over or self._n_rest > 1 << 16 or _COLOUR.search(data):
                raise _NO_TIMES

    def _add(self, text: str, *, is_end: bool) -> Iterator[tuple[int, int | None, str | None]]:
        """More of the open entry, or what lies before the first one."""
        self._line += text.count("\n")
        self._said += text[: _LONGEST_ENTRY + 1 - len(self._said)]
        if is_end:
            if self._entry is not None:
                yield *self._entry, self._said.rstrip("\n")
            self._said = ""


def _json_entry(number: int, line: str) -> Iterator[tuple[int, int | None, str | None]]:
    entry_text = line.strip()
    if not entry_text:
        return
    if entry_text[0] != "{" or entry_text[-1] != "}":  # a million short lines take no parser
        yield number, None, None
        return
    try:
        entry = parse_json(entry_text, whole_texts=True)
    except JsonError:
        yield number, None, None
        return
    if isinstance(entry, dict) and isinstance(entry.get("msg"), str):
        time = entry.get("time")
        yield number, time if is_whole(time, LARGEST) else None, entry["msg"].rstrip("\n")


def _microseconds(stamp: re.Match[str]) -> int:
    minutes, seconds, ms, us = (int(stamp[i]) for i in range(1, 5))
    return ((minutes * 60 + seconds) * 1000 + ms) * 1000 + us


def is_log(head: bytes) -> bool:
    """Whether a file's first bytes may be those of a log."""
    text = head[:4096].decode("utf-8", "replace").lstrip()
    is_ours = text.startswith('{"type":"log"') or _STAMP.match(text) is not None
    # one that cannot be read still gets the remedy: how to start the server
    return is_ours or (not text.startswith("{") and "llama_server: " in text)
