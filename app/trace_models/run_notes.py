"""Run notes that the window stores in the facts of a run: the user's name for it, and what lists
show while its rows are on disk."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from engine.conversation.turns import content_of, turn_of
from engine.trace.facts import RunFacts, RunNotes
from engine.trace.records import REFERENCE
from engine.trace.run_ref import RunColumns, RunRef

FACT = "library"
SOURCE = "library"
"""Fact of a trace: the heading of its runs in lists."""
STARTED = "started"
"""Fact of a run started by this window: its time, ISO 8601."""
_LONGEST_PROMPT = 200


def notes_of(facts: RunFacts) -> RunNotes:
    """The notes of a run."""
    return facts.library or RunNotes()


def number_of(run: RunRef) -> int:
    """The number of a run across sessions; if it has none, that in its trace, for a lane that of
    its comparison."""
    number = notes_of(run.facts).number
    if number is None:
        number = run.run_id
        while number and run.sibling(number).facts.lane not in (None, REFERENCE):
            number -= 1
    return number


def run_name(run: RunRef) -> str:
    """The user's name for a run, else its number: "run 3", for a lane "run 3, planes"."""
    lane = f", {run.facts.lane}" if run.facts.lane else ""
    return notes_of(run.facts).name or f"run {number_of(run)}{lane}"


def count_runs(runs: Iterable[RunRef]) -> int:
    """The number of runs; lanes of a comparison count as one."""
    return len({(run.store, number_of(run)) for run in runs})


def note(run: RunRef, **changes: Any) -> None:
    """Change notes of a run."""
    run.facts.library = replace(notes_of(run.facts), **changes)  # other threads may read the old


def describe_prompt(run: RunRef) -> None:
    """Store the prompt's beginning for lists, while its rows are in memory."""
    found = prompt_text(run)
    if found and notes_of(run.facts).prompt != found:
        note(run, prompt=found)


def prompt_text(run: RunRef) -> str:
    """The beginning of the first sequence's prompt, on one line; in a conversation, whose turns all
    begin alike, the last message; empty if unknown."""
    turn = turn_of(run.run_id, run.facts)
    if turn is not None and turn.messages:
        return " ".join(content_of(turn.messages[-1]).split())[:_LONGEST_PROMPT]
    store, tokens = run.store, RunColumns(run.store, "tokens", run.run_id)
    ids = tokens["token_id"][tokens.is_text("kind", "prompt") & (tokens["seq_id"] == 0)]
    pieces = (store.pieces.get(token, b"") for token in ids[:_LONGEST_PROMPT].tolist())
    text = b"".join(pieces).decode("utf-8", "replace")
    return " ".join(text.split())[:_LONGEST_PROMPT] or sent(run.facts)[0]


def sent(facts: RunFacts, seq_id: int = 0) -> tuple[str, str]:
    """The beginning of a prompt sent to another engine, on one line, and its reply; or empty."""
    if (request := facts.request(seq_id)) is None:
        return "", ""
    said = request.prompt or "".join(map(content_of, request.messages[-1:]))
    return " ".join(said[: 4 * _LONGEST_PROMPT].split())[:_LONGEST_PROMPT], request.text


def reply_texts(facts: RunFacts) -> dict[int, str]:
    """Another engine's replies by sequence, if tokens do not give them."""
    every = enumerate(facts.requests or ())
    return {seq_id: request.text for seq_id, request in every if request.text}


def started_at(facts: RunFacts) -> datetime | None:
    """Start time of a run, None if unknown."""
    try:
        return datetime.fromisoformat(facts.started or "").astimezone()
    except (ValueError, OverflowError, OSError):
        return None
