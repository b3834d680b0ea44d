"""Turns of conversations as a tree, their context checkpoints from the facts of runs, and recorded
conversations as turns.

A turn is the messages since the previous answer, and its own answer. One that follows another than
the newest turn is a branch; an edited turn is a branch next to the one it replaces. Turns are
stored in the trace only, so a reopened trace has its conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.files import is_unicode, json_values, user_text
from engine.trace.facts import RunFacts
from engine.trace.prompt_reuse import PromptReuseRecord, ReuseSource, WhyProcessed

Message = dict[str, Any]
"""A role, a content, and anything else that a chat template reads, as in OpenAI's messages."""
_MISSES = (WhyProcessed.NO_CHECKPOINT, WhyProcessed.EVICTED, WhyProcessed.OFF, WhyProcessed.ERASED)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. number: within its conversation, from 0; parent: number of the previous turn, None
    for a first one.

    messages: those since the parent's answer. answer: None until it is complete. is_recorded:
    whether the answer was given instead of generated. is_chat: whether a chat template made the
    prompt. start: first token of its messages in its prompt. rewritten_at: where the prompt departs
    from the tokens of the previous turn although its text continues it; None if it does not, or
    they are unknown. record: prompt reuse, None until it is known.
    """

    run_id: int
    conversation: int
    number: int
    parent: int | None
    messages: tuple[Message, ...]
    answer: Message | None
    is_recorded: bool
    is_chat: bool
    start: int
    rewritten_at: int | None
    record: PromptReuseRecord | None

    @property
    def text(self) -> str:
        """The text of its messages."""
        return "\n".join(content_of(message) for message in self.messages)


class TurnTree:
    """The turns of one conversation of a trace. `turns`: by their numbers, in their order."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = {turn.number: turn for turn in turns}

    @classmethod
    def of(cls, runs: Mapping[int, RunFacts], conversation: int) -> TurnTree:
        """From the facts of a trace's runs. A turn without its parent is left out."""
        found: dict[int, Turn] = {}
        for run_id, facts in list(runs.items()):
            turn = turn_of(run_id, facts)
            if turn is None or turn.conversation != conversation:
                continue
            if turn.parent is None or turn.parent in found:
                found[turn.number] = turn
        return cls(list(found.values()))

    def path(self, number: int | None) -> list[Turn]:
        """The turns from the first one to this one; none for None."""
        found: list[Turn] = []
        while number is not None:
            found.append(self.turns[number])
            parent = self.turns[number].parent
            number = parent if parent is None or parent < number else None
        return found[::-1]

    def siblings(self, number: int) -> list[int]:
        """Numbers of the turns with the same parent, including this one, in order."""
        parent = self.turns[number].parent
        return sorted(n for n, turn in self.turns.items() if turn.parent == parent)

    def newest_behind(self, number: int) -> int:
        """The last turn of the newest branch through this turn."""
        while following := [
            n for n, turn in self.turns.items() if turn.parent == number and n > number
        ]:
            number = max(following)
        return number

    def messages(self, number: int | None) -> list[Message]:
        """All messages up to a turn's answer, which is included."""
        said: list[Message] = []
        for turn in self.path(number):
            said += [*turn.messages, *([turn.answer] if turn.answer else [])]
        return said

    def __len__(self) -> int:
        return len(self.turns)


def conversations(runs: Mapping[int, RunFacts]) -> list[int]:
    """Numbers of the conversations of a trace, the first one first."""
    turns = (turn_of(run_id, facts) for run_id, facts in list(runs.items()))
    return list(dict.fromkeys(turn.conversation for turn in turns if turn))


def content_of(message: Message) -> str:
    """The content of a message; tool calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else ""
    return text + (json.dumps(calls, ensure_ascii=False) if calls else "")


def turn_of(run_id: int, facts: RunFacts) -> Turn | None:
    """The turn of a run, None if it is not a turn."""
    turn = facts.turn
    if turn is None:
        return None
    return Turn(
        run_id,
        turn.conversation,
        turn.number,
        turn.parent,
        tuple(turn.messages),
        turn.answer,
        turn.is_recorded,
        turn.is_chat,
        turn.start,
        turn.rewritten_at,
        next(iter(facts.prompt_reuse or ()), None),
    )


@dataclass(slots=True)
class CheckpointMark:
    """A stored context checkpoint. n_tokens: tokens covered; run_id: of the prompt that saved it;
    hits: prompts that restored it."""

    n_tokens: int
    n_bytes: int
    run_id: int
    hits: int = 0


CheckpointMiss = tuple[int, int, int, WhyProcessed]
"""A prompt without the checkpoint it needed: its run, where its text departs from the one in
memory, where processing began, and why."""


@dataclass(slots=True)
class CheckpointHistory:
    """held: by tokens covered, ascending. n_evicted, n_erased: numbers of removed ones."""

    held: list[CheckpointMark] = field(default_factory=list)
    misses: list[CheckpointMiss] = field(default_factory=list)
    n_hits: int = 0
    n_evicted: int = 0
    n_erased: int = 0

    @classmethod
    def of(cls, runs: Mapping[int, RunFacts], slot: int, last_run: int) -> CheckpointHistory:
        """For a slot of the memory, from the facts of all runs up to one."""
        found, marks = cls(), dict[int, CheckpointMark]()
        for run_id, facts in list(runs.items()):
            for record in facts.prompt_reuse or () if run_id <= last_run else ():
                if record.slot != slot or facts.attachment is not None:
                    continue  # another slot, or another engine's
                if record.n_held == 0:  # a new memory
                    marks = {}
                found.n_erased += len(record.erased)
                found.n_evicted += len(record.evicted)
                if record.source is ReuseSource.CHECKPOINT and record.checkpoint is not None:
                    found.n_hits += 1
                    if mark := marks.get(record.checkpoint):
                        mark.hits += 1
                found.misses += [
                    (run_id, part.stop, record.n_reused, part.why)
                    for part in record.parts
                    if part.why in _MISSES
                ]
                for saved in record.created:
                    marks[saved.n_tokens] = CheckpointMark(saved.n_tokens, saved.n_bytes, run_id)
                held = {n for n, _ in record.held}
                marks = {n: mark for n, mark in marks.items() if n in held}
        found.held = [marks[n] for n in sorted(marks)]
        return found


_MOST_BYTES = 1 << 26
_MOST_TURNS = 10_000
_LONGEST_ROLE = 64
_TEXT_PARTS = ("text", "input_text", "output_text")
_REMEDY = 'Give messages like {"role": "user", "content": "Hello"}.'


RecordedTurn = tuple[int | None, tuple[Message, ...], Message | None]
"""One turn: index of the previous turn, None for a first one; its messages; and the answer, None at
the end of the record."""
RecordedConversation = tuple[list[RecordedTurn], bool, list[dict[str, Any]] | None]
"""A file's turns, parents first; whether its messages have roles instead of being plain texts; and
tools, from the first request with any."""


def read_recorded(path: Path) -> RecordedConversation:
    """The conversation of a file: one JSON value or JSON lines.

    A value is a message with a role, a text or a named text ({"name": …, "text": …}), each a turn
    of its own, or a request ({"messages": […], "tools": […]}). Several requests, for example from
    an agent's log, are one conversation: each continues the longest history that it shares with
    earlier ones, so an edited history becomes a branch.

    Raises OptionError, naming file and place, for anything else, and for a file above 64 MiB, with
    more than 10,000 turns or without a message.
    """
    text, give = user_text(path, _MOST_BYTES), "Give one JSON value, or one per line."
    entries = list(json_values(path, text, "message", give))
    tools, turns = None, _Turns(path)
    if any(isinstance(value, dict) and "messages" in value for _, value in entries):
        for place, value in entries:
            listed = value.get("messages") if isinstance(value, dict) else None
            if not isinstance(listed, list):
                raise OptionError(f"{path}: {place} has no list of messages.", _REMEDY)
            tools = tools or _tools(path, place, value.get("tools"))
            within = [(f"{place}, message {n}", one) for n, one in enumerate(listed, 1)]
            turns.add([_message(path, where, one) for where, one in within])
        has_roles = True
    else:
        messages = [_message(path, place, value) for place, value in entries]
        has_roles = any(isinstance(value, dict) and "role" in value for _, value in entries)
        if has_roles:
            turns.add(messages)
        else:
            turns.found = [(n - 1 if n else None, (one,), None) for n, one in enumerate(messages)]
    if not turns.found:
        raise OptionError(f"{path} holds no message.", _REMEDY)
    return turns.found, has_roles, tools


class _Turns:
    """Turns of histories with a common beginning."""

    def __init__(self, path: Path) -> None:
        self.found: list[RecordedTurn] = []
        self._path = path
        self._known: dict[tuple[int | None, str], int] = {}

    def add(self, messages: Sequence[Message]) -> None:
        """Add one complete history."""
        parent: int | None = None
        said: list[Message] = []
        for message in messages:
            # an unsolicited assistant message is part of what the next turn reads
            if message["role"] == "assistant" and any(m["role"] != "assistant" for m in said):
                parent, said = self._turn(parent, said, message), []
            else:
                said.append(message)
        if any(message["role"] != "assistant" for message in said):
            self._turn(parent, said, None)

    def _turn(self, parent: int | None, said: Sequence[Message], answer: Message | None) -> int:
        asked = json.dumps(said, sort_keys=True)
        key = parent, json.dumps([asked, answer], sort_keys=True)
        open_key = parent, json.dumps([asked, None], sort_keys=True)
        index = self._known.get(key)
        if index is None and (index := self._known.pop(open_key, None)) is not None:
            self.found[index] = *self.found[index][:2], answer
        if index is None:
            index = len(self.found)
            self.found.append((parent, tuple(said), answer))
            if index >= _MOST_TURNS:
                raise OptionError(f"{self._path} has more than {_MOST_TURNS:,} turns.", "Split it.")
        self._known[key] = index
        return index


def _message(path: Path, place: str, value: Any) -> Message:
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if isinstance(value, dict) and "role" not in value and isinstance(value.get("text"), str):
        value = {"role": "user", "content": value["text"]}
    if not isinstance(value, dict):
        raise OptionError(f"{path}: {place} is neither a text nor a message.", _REMEDY)
    role = value.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _LONGEST_ROLE:
        raise OptionError(f"{path}: {place} has no role.", _REMEDY)
    return {**value, "content": _text(path, place, value.get("content"))}


def _text(path: Path, place: str, content: Any) -> str:
    """A content as one text: OpenAI's may be a list of parts, or null with calls of tools."""
    if content is None or isinstance(content, str):
        if not is_unicode(content or ""):
            raise OptionError(f"{path}: {place} has an incomplete character.", "Correct its text.")
        return content or ""
    if not isinstance(content, list):
        raise OptionError(f"{path}: {place} has a content that is not text.", _REMEDY)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise OptionError(
                f"{path}: {place} has a part of type {str(kind)[:40]!r}, which is not text.",
                "Leave such parts out.",
            )
        texts.append(text)
    return _text(path, place, "".join(texts))


def _tools(path: Path, place: str, tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise OptionError(
            f"{path}: {place} has tools that are no list of objects.", "Correct or remove them."
        )
    return tools
