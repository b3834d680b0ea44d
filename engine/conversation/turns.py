"""Turns of conversations as a tree, and their context checkpoints, read from the facts of runs.

A turn is what was said since the answer before it, and its own answer. One that follows another
than the newest turn is a branch; an edited turn is a branch next to the one that it replaces. The
trace is the only place where turns are kept, so a reopened one has its conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.trace.facts import RunFacts
from engine.trace.prompt_reuse import PromptReuseRecord, ReuseSource, WhyProcessed

Message = dict[str, Any]
"""A role, a content, and whatever else a chat template reads, as OpenAI's messages have them."""
_MISSES = (WhyProcessed.NO_CHECKPOINT, WhyProcessed.EVICTED, WhyProcessed.OFF, WhyProcessed.ERASED)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. number: within its conversation, from 0; parent: of the turn before it, None for
    a first one.

    messages: those said since the parent's answer. answer: None while it is written.
    is_recorded: whether the answer was given, not written here. is_chat: whether a chat template
    made the prompt. start: where the tokens of its messages begin in its prompt. rewritten_at:
    where the prompt parts from the tokens of the turn before, although its text goes on from
    there; None where it does not, or those are unknown.
    record: what the prompt found in memory, None until it is looked at.
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
        """What the messages say."""
        return "\n".join(content_of(message) for message in self.messages)


class TurnTree:
    """The turns of one conversation of a trace. `turns`: by their numbers, in their order."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = {turn.number: turn for turn in turns}

    @classmethod
    def of(cls, runs: Mapping[int, RunFacts], conversation: int) -> TurnTree:
        """From the facts of a trace's runs. A turn whose parent is not there is left out."""
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
        """The turns that follow the same turn as this one, itself among them, in order."""
        parent = self.turns[number].parent
        return sorted(n for n, turn in self.turns.items() if turn.parent == parent)

    def newest_behind(self, number: int) -> int:
        """The turn at the end of the newest branch that this turn is in."""
        while following := [
            n for n, turn in self.turns.items() if turn.parent == number and n > number
        ]:
            number = max(following)
        return number

    def messages(self, number: int | None) -> list[Message]:
        """All that has been said up to the answer of a turn."""
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
    """What a message says; calls of tools as JSON has them."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = content if isinstance(content, str) else ""
    return text + (json.dumps(calls, ensure_ascii=False) if calls else "")


def turn_of(run_id: int, facts: RunFacts) -> Turn | None:
    """The turn that a run answered, None where it is not a turn's."""
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
    """A context checkpoint that is kept. n_tokens: those it covers; run_id: of the prompt that it
    was saved for; hits: prompts that began at it."""

    n_tokens: int
    n_bytes: int
    run_id: int
    hits: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointMiss:
    """A prompt that found no checkpoint where it needed one. n_common: where its text parts from
    the one in memory; n_reused: where it began."""

    run_id: int
    n_common: int
    n_reused: int
    why: WhyProcessed


@dataclass(slots=True)
class CheckpointHistory:
    """held: by the tokens they cover, ascending. n_evicted, n_erased: those that are gone."""

    held: list[CheckpointMark] = field(default_factory=list)
    misses: list[CheckpointMiss] = field(default_factory=list)
    n_hits: int = 0
    n_evicted: int = 0
    n_erased: int = 0

    @classmethod
    def of(cls, runs: Mapping[int, RunFacts], slot: int, last_run: int) -> CheckpointHistory:
        """Of a slot of the memory, from the facts of all runs up to one."""
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
                    CheckpointMiss(run_id, part.stop, record.n_reused, part.why)
                    for part in record.parts
                    if part.why in _MISSES
                ]
                for saved in record.created:
                    marks[saved.n_tokens] = CheckpointMark(saved.n_tokens, saved.n_bytes, run_id)
                held = {n for n, _ in record.held}
                marks = {n: mark for n, mark in marks.items() if n in held}
        found.held = [marks[n] for n in sorted(marks)]
        return found
