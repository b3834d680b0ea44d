"""Prompt reuse: how much of a prompt was reused from memory, what was processed, and why.

The engine notes one record per sequence of a run with a prompt cache in the fact `prompt_reuse`;
rules and views read it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from engine.foreign import Count, Size


class ReuseSource(StrEnum):
    """What reused tokens came from."""

    NOTHING = "nothing"
    LIVE = "live"
    ROLLBACK = "rollback"
    CELLS = "cells"
    CHECKPOINT = "checkpoint"


class WhyProcessed(StrEnum):
    """Why a part of a prompt had to be processed."""

    FIRST = "first"
    NEW = "new"
    DIFFERS = "differs"
    LAST = "last"
    BEHIND_CHECKPOINT = "behind-checkpoint"
    NO_CHECKPOINT = "no-checkpoint"
    EVICTED = "evicted"
    OFF = "off"
    ERASED = "erased"

    @property
    def sentence(self) -> str:
        """The reason in words, which follow "because"."""
        return _SENTENCES[self]

    @property
    def is_again(self) -> bool:
        """Whether memory had held this text before."""
        return self not in (WhyProcessed.FIRST, WhyProcessed.NEW, WhyProcessed.DIFFERS)


_SENTENCES = {
    WhyProcessed.FIRST: "memory had no text with these settings",
    WhyProcessed.NEW: "it is new after the text in memory",
    WhyProcessed.DIFFERS: "memory had another text from here on",
    WhyProcessed.LAST: "the last token of a prompt is always decoded: its logits are not kept",
    WhyProcessed.BEHIND_CHECKPOINT: "the nearest context checkpoint is before it",
    WhyProcessed.NO_CHECKPOINT: "the recurrent state cannot go back that far, and no context "
    "checkpoint is before it",
    WhyProcessed.EVICTED: "its context checkpoint was evicted",
    WhyProcessed.OFF: "the recurrent state cannot go back that far, and context checkpoints are "
    "off",
    WhyProcessed.ERASED: "its context checkpoint was erased although it was usable",
}


@dataclass(frozen=True, slots=True)
class ProcessedPart:
    """Tokens start to stop of a prompt, which were processed."""

    start: Count
    stop: Count
    why: WhyProcessed


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A context checkpoint. n_tokens: tokens it is kept for; state_tokens: tokens of the prompt
    that were decoded when it was copied."""

    n_tokens: Count
    state_tokens: Count
    n_bytes: Size


@dataclass(slots=True)
class PromptReuseRecord:
    """Reuse of one prompt, in tokens.

    slot: the sequence in memory. n_held: tokens in the slot; n_common: length of their common
    prefix with the prompt. n_reused: tokens that needed no processing. depth: tokens to undo to
    reach the common prefix; valid_depth: how many the snapshots could undo (None without recurrent
    states). checkpoint: tokens of the context checkpoint restored. state_tokens, cell_tokens:
    tokens in recurrent state and attention cells when the prompt continued. drafters: tokens in
    stateful drafters then. created, evicted, erased: context checkpoints saved for this prompt,
    evicted for lack of room, and erased because they describe another text; usable: erased ones
    that did not. held: tokens and bytes of those present at its end.
    """

    seq_id: Count
    slot: Count
    n_prompt: Count
    n_held: Count
    n_common: Count
    n_reused: Count
    source: ReuseSource
    parts: list[ProcessedPart]
    depth: Count = 0
    valid_depth: Count | None = None
    checkpoint: Count | None = None
    state_tokens: Count | None = None
    cell_tokens: Count | None = None
    drafters: dict[str, Count] = field(default_factory=dict)
    created: list[SavedCheckpoint] = field(default_factory=list)
    evicted: list[Count] = field(default_factory=list)
    erased: list[Count] = field(default_factory=list)
    usable: list[Count] = field(default_factory=list)
    held: list[tuple[Size, Size]] = field(default_factory=list)

    @property
    def n_again(self) -> int:
        """Tokens processed although memory had held the same text."""
        return sum(part.stop - part.start for part in self.parts if part.why.is_again)

    def note(self, facts: dict[str, Any]) -> None:
        """Store the record in the facts of its run, replacing an earlier state of it."""
        others = [one for one in facts.get("prompt_reuse", ()) if one["seq_id"] != self.seq_id]
        facts["prompt_reuse"] = [*others, asdict(self)]


def reused_text(record: PromptReuseRecord) -> str:
    """What was reused and its source, as one sentence without its full stop."""
    n = record.n_reused
    tokens = f"{n:,} of {record.n_prompt:,} tokens reused"
    return {
        ReuseSource.NOTHING: f"0 of {record.n_prompt:,} tokens reused",
        ReuseSource.LIVE: f"{tokens}: common prefix, live state",
        ReuseSource.ROLLBACK: f"{tokens}: common prefix, state rolled back {record.depth:,} within "
        f"its snapshots (limit {record.valid_depth})",
        ReuseSource.CELLS: f"{tokens}: common prefix, KV cells truncated",
        ReuseSource.CHECKPOINT: f"{tokens}: context checkpoint at {record.checkpoint or 0:,}",
    }[record.source]


def processed_lines(record: PromptReuseRecord) -> list[str]:
    """What was processed and why, a line for each part."""
    return [
        f"{part.stop - part.start:,} processed from {part.start:,}: {part.why.sentence}"
        for part in record.parts
    ]


def n_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix of tokens, or of characters."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
