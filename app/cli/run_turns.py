"""`draftscope run --turns`: a conversation turn by turn, with what each turn took from memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.files import open_session
from app.cli.findings import finding_lines, findings_json
from app.cli.interruption import signals_wait
from app.cli.option_notes import print_notes
from app.cli.output import print_json, print_lines
from app.cli.recorded import decode, export
from app.cli.run_arguments import cache_options, refuse_cache
from engine.analysis.audit_text import audit_text
from engine.conversation.recorded import RecordedConversation, RecordedTurn, read_recorded
from engine.conversation.turns import Turn, content_of
from engine.errors import OptionError
from engine.options import RunOptions
from engine.size_text import size_text
from engine.trace.prompt_reuse import processed_lines, reused_text
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.conversation.conversation import Conversation
    from engine.session import Session

_LONGEST_TITLE = 60


def refuse_turns(args: argparse.Namespace) -> None:
    """Raises OptionError for what goes with --turns only."""
    refuse_cache(args, "--turns")
    if args.turns_answers is not None:
        raise OptionError("--turns-answers goes with --turns only.", "Leave it out.")


def run_turns(
    args: argparse.Namespace, options: RunOptions, target: Path, drafts: list[Path]
) -> int:
    """Hold the conversation of the file; what was recorded is exported, also after an error."""
    for given, name in (
        (args.sources, "A prompt"),
        (args.report, "--report"),
        (args.markdown, "--markdown"),
    ):
        if given:
            raise OptionError(f"{name} cannot be combined with --turns.", "Leave one out.")
    cached = cache_options(args)
    recorded = read_recorded(args.turns)
    print_notes(options, has_cache=cached is not None)
    session = open_session(args, target, drafts)
    from engine.conversation.conversation import Conversation, Rendering
    from engine.decode.held_sequences import PromptCache

    is_chat = args.chat or (recorded.has_roles and session.chat is not None)
    rendering = Rendering(
        session, is_chat=is_chat, template_values=args.chat_template_kwargs, tools=recorded.tools
    )
    trace = TraceStore()
    conversation = Conversation(session, trace, rendering, PromptCache(cached) if cached else None)
    if not args.json:
        how = "through the model's chat template" if is_chat else "joined as plain text"
        print_lines((f"{len(recorded.turns)} turns, messages {how}", ""))
    answers = args.turns_answers or "recorded"
    try:
        for number, turn in enumerate(recorded.turns):
            _hold(
                conversation,
                session,
                turn,
                options,
                answers,
                is_traced=args.trace is not None,
                audit=args.audit,
            )
            if not args.json:
                print_lines((*_turn_lines(conversation.tree.turns[number], trace), ""))
    finally:
        if args.trace is not None and trace.runs:
            with signals_wait():
                export(trace, args.trace, session.content)
    turns = list(conversation.tree.turns.values())
    if args.json:
        print_json(_report(turns, recorded, trace, options, session, is_chat=is_chat))
        return 0
    print_lines((*finding_lines(trace), *_total_lines(turns)))
    return 0


def _hold(
    conversation: Conversation,
    session: Session,
    turn: RecordedTurn,
    options: RunOptions,
    answers: str,
    *,
    is_traced: bool,
    audit: bool | None,
) -> None:
    """Decode one turn of the file."""
    given = turn.answer if answers == "recorded" else None
    from engine.audit.run_audit import audit_of

    make = partial(audit_of, session, asked=audit, can_repeat=False)
    run = conversation.start(turn.messages, turn.parent, options, given, audit=make)
    if is_traced and session.content is not None:
        session.content.start(lambda: run.done or any(run.emitted))
    decode(run, run.advance, None)


def _turn_lines(turn: Turn, trace: TraceStore) -> Iterator[str]:
    title = " ".join(turn.text.split())
    if len(title) > _LONGEST_TITLE:
        title = title[: _LONGEST_TITLE - 1] + "…"
    where = "" if turn.parent is None else f" after turn {turn.parent + 1}"
    yield f"turn {turn.number + 1}{where}: {title}"
    facts = trace.runs[turn.run_id]
    yield from (f"  {line}" for line in (*turn_facts(turn), *audit_text(facts)))
    if turn.is_recorded:
        yield "  answer: as recorded"
        return
    stops = facts.stops or [""]
    n = (facts.summary or {})["predicted_n"]
    tokens = "1 token" if n == 1 else f"{n:,} tokens"
    yield f"  answer, {tokens}, ended by {stops[0]}: {content_of(turn.answer or {})!r}"


def turn_facts(turn: Turn) -> Iterator[str]:
    """What a turn reused, processed and saved, in lines."""
    record = turn.record
    if record is None:
        yield "no prompt cache: all of the prompt was processed"
        return
    yield reused_text(record)
    yield from processed_lines(record)
    if turn.rewritten_at is not None:
        yield (
            f"the text so far has other tokens from {turn.rewritten_at:,} on than were written: "
            "an end token, the chat template or the tokeniser makes the difference"
        )
    places = ", ".join(f"{n:,}" for n, _ in record.held) or "none"
    n_bytes = sum(size for _, size in record.held)
    line = f"context checkpoints: {places}" + (f" ({size_text(n_bytes)})" if n_bytes else "")
    for what, found in (
        ("saved", [one.n_tokens for one in record.created]),
        ("made room", record.evicted),
        ("erased", record.erased),
    ):
        if found:
            line += f"; {what} {', '.join(f'{n:,}' for n in found)}"
    yield line


def _total_lines(turns: list[Turn]) -> Iterator[str]:
    records = [turn.record for turn in turns if turn.record]
    if not records:
        return
    n_all = sum(record.n_prompt for record in records)
    n_reused = sum(record.n_reused for record in records)
    n_again = sum(record.n_again for record in records)
    hits = sum(record.checkpoint is not None for record in records)
    yield (
        f"{len(records)} turns: {n_all:,} prompt tokens, {n_reused:,} reused, "
        f"{n_all - n_reused:,} processed, {n_again:,} of these again; "
        f"{hits} turns began at a context checkpoint"
    )


def _report(
    turns: list[Turn],
    recorded: RecordedConversation,
    trace: TraceStore,
    options: RunOptions,
    session: Session,
    *,
    is_chat: bool,
) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "kind": "draftscope turns",
        "version": 1,
        "chat": is_chat,
        "turns": [
            {
                **asdict(replace(turn, record=None)),
                "record": asdict(turn.record) if turn.record else None,
                "n_again": turn.record.n_again if turn.record else None,
                "stop": (trace.runs[turn.run_id].stops or [""])[0],
                **trace.runs[turn.run_id].pick("summary", "audit"),
            }
            for turn in turns
        ],
        "tools": len(recorded.tools or ()),
        "options": {**asdict(options), "compute": session.compute},
        "findings": findings_json(trace),
    }
