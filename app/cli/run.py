"""`draftscope run`: a session without a window; with --turns a conversation, with the prompt reuse
of each turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import draft_paths, drafts_by_mtp, open_session, target_path
from app.cli.option_lines import refuse_given
from app.cli.output import (
    end_text,
    is_coloured,
    note,
    print_json,
    print_line,
    print_lines,
    print_text,
    print_texts,
    signals_wait,
    tell,
)
from app.cli.recorded import (
    check_report,
    check_trace_folder,
    deliver_report,
    export,
    finding_lines,
    findings_json,
    record,
)
from app.cli.run_arguments import (
    PromptSource,
    cache_options,
    given_options,
    print_notes,
    run_options,
    styled,
)
from engine.analysis.findings.audit import audit_text
from engine.conversation.turns import RecordedTurn, Turn, content_of, read_recorded
from engine.draft.registry import DRAFTERS
from engine.environment import environment
from engine.errors import OptionError
from engine.fork import Fork, fork_lines
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import StreamDecoder
from engine.model.tensors import has_mtp_block
from engine.options import Prompt, RunOptions
from engine.plain_text import counted, size_text
from engine.report.run import figure_lines, run_report, why_it_ended
from engine.trace.prompt_reuse import processed_lines, reused_text
from engine.trace.records import EMITTED_KINDS, GHOST_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.conversation.conversation import Conversation
    from engine.run import Run
    from engine.session import Session


def run(args: argparse.Namespace) -> int:
    """Decode all prompts; what was recorded is exported, also after an error or a signal."""
    target = target_path(args)
    if args.spec_draft_model and args.spec_type is None:
        args.spec_type = tuple(draft_paths(args))
    options = run_options(args)
    drafts = draft_files(args, options)
    check_trace_folder(args.trace)
    check_report(args)
    if args.turns is not None:
        return run_turns(args, options, target, drafts)
    refuse_given(args, "--turns", "--turns-answers", "+cache")
    trace, fork = TraceStore(), None
    if args.fork_from is not None:
        fork = _fork(args)
        trace, options = fork.parent.store, given_options(args, fork.options)
        types = (*fork.options.spec.types, *options.spec.types)
        both = replace(options, spec=replace(options.spec, types=tuple(dict.fromkeys(types))))
        drafts = draft_files(args, both)
    else:
        refuse_given(args, "--from TRACE", "+forks")
        if not args.sources:
            raise OptionError("There is no prompt.", "Give one with -p, -f, --tokens or --turns.")
    print_notes(options)
    session = open_session(args, target, drafts, options)
    if fork:
        fork.check_model(session.identity, session.compute, session.content)
        tell(f"decoding rounds 0 to {fork.round - 1} of {fork.parent} again")
        prompts = [
            Prompt(one.tokens, session.tokenizer.decode(one.tokens)) for one in fork.prompts()
        ]
    else:
        prompts = [make_prompt(session, args, source) for source in args.sources]
    from engine.audit.run_audit import audit_of

    audit = None if fork else audit_of(session, prompts, options, asked=args.audit)
    job = session.start(prompts, options, trace, audit=audit, fork=fork)
    streaming = not (args.json or args.markdown) and len(prompts) == 1
    if streaming:
        stream = _Stream(trace, job.run_id, session, "" if args.chat else prompts[0].text)
        record(job, job.advance, args.trace, session.content, stream.show)
        stream.end()
    else:
        record(job, job.advance, args.trace, session.content)
    if deliver_report(
        args, lambda words: run_report(RunRef(trace, job.run_id), environment(), words)
    ):
        return 0
    if args.json:
        print_json(_report(job, session, options, target, drafts))
        return 0
    if not streaming:
        for seq_id, prompt in enumerate(prompts):
            print_line(f"--- sequence {seq_id}")
            stream = _Stream(trace, job.run_id, session, "" if args.chat else prompt.text, seq_id)
            stream.show()
            stream.end()
    print_lines(finding_lines(trace, job.run_id))
    if args.audit:
        for line in audit_text(trace.runs[job.run_id]):
            tell(line)
    ran = RunRef(trace, job.run_id)
    print_lines((*figure_lines(job.summary()), *fork_lines(ran)))
    if {*(ran.facts.stops or ())} - {"limit"}:
        note(why_it_ended(ran))
    return 0


def _fork(args: argparse.Namespace) -> Fork:
    """The fork point from the arguments, with its compute mode and threads as defaults. Raises
    OptionError and TraceFileError."""
    from engine.trace.reopen import open_trace

    for given, name in ((args.sources, "A prompt"), (args.audit, "--audit")):
        if given:
            raise OptionError(f"{name} cannot be combined with --from.", "Leave one out.")
    if (args.round is None) == (args.position is None):
        raise OptionError("--from needs either --round or --position.", "Give one of the two.")
    store = open_trace(args.fork_from)
    run_id = args.from_run if args.from_run is not None else min(store.runs, default=0)
    if run_id not in store.runs:
        raise OptionError(f"The trace has no run {run_id}.", "Name another with --from-run.")
    parent = RunRef(store, run_id)
    if args.round is not None:
        fork = Fork(parent, args.round, args.force, args.from_seq)
    else:
        fork = Fork.after(parent, args.position, args.from_seq, args.force)
    facts = parent.facts
    if args.compute == "auto" and facts.compute:
        args.compute = facts.compute
    args.threads = args.threads or facts.threads
    return fork


def draft_files(args: argparse.Namespace, options: RunOptions) -> list[Path]:
    """Files of the drafters in use. Raises OptionError for a drafter without its file and for an
    unused file of -md, and like draft_paths."""
    there, types = draft_paths(args), options.spec.types
    if drafts_by_mtp(types) and "draft-mtp" not in there and "draft-simple" in there:
        with GgufFile.open(there["draft-simple"]) as file:
            if has_mtp_block(file):
                there["draft-mtp"] = there.pop("draft-simple")
    for name in types:
        need = DRAFTERS[name].needs
        if need and DRAFTERS[name].has_file and name not in there:
            article = "an" if need[0][:1] in "AEIOU" else "a"
            raise OptionError(f"{name} needs {article} {need[0]}.", "Give one with -md.")
    for name, path in there.items() if args.spec_draft_model else ():
        if types and name not in types:
            raise OptionError(
                f"{path.name} is for {name}, which is not among --spec-type {','.join(types)}.",
                f"Add {name} to --spec-type, or leave out -md.",
            )
    return [there[name] for name in types if name in there]


def make_prompt(session: Session, args: argparse.Namespace, source: PromptSource) -> Prompt:
    """A prompt from the arguments. Raises OptionError for --chat without a template."""
    if isinstance(source, tuple):
        return Prompt(source, session.tokenizer.decode(source, special=True))
    values = args.chat_template_kwargs if args.chat else None
    return session.message_prompt(source, values, "Leave out --chat.")


class _Stream:
    """Prints a prompt, and its continuation round by round; with colours also rejected drafts at
    their place, otherwise the text alone."""

    def __init__(
        self, trace: TraceStore, run_id: int, session: Session, prompt: str, seq_id: int = 0
    ) -> None:
        self._tokens, self._run_id, self._seq_id = trace.tokens, run_id, seq_id
        self._tokenizer = session.tokenizer
        self._decoder = StreamDecoder(session.tokenizer)
        self._kinds = (*EMITTED_KINDS, *GHOST_KINDS) if is_coloured() else EMITTED_KINDS
        self._seen = 0
        print_text(prompt)

    def show(self) -> None:
        n = len(self._tokens)
        kinds = self._tokens.texts("kind", self._seen, n)
        ids = self._tokens.column("token_id", self._seen, n).tolist()
        is_mine = self._tokens.column("seq_id", self._seen, n) == self._seq_id
        is_mine &= self._tokens.column("run_id", self._seen, n) == self._run_id
        self._seen = n
        print_texts(
            styled(self._text(token, kind), kind)
            for token, kind, mine in zip(ids, kinds, is_mine.tolist(), strict=True)
            if mine and kind in self._kinds
        )

    def _text(self, token: int, kind: str) -> str:
        if kind in GHOST_KINDS:
            return self._tokenizer.decode((token,), special=True)
        return self._decoder.push(token)

    def end(self) -> None:
        """Print the rest of an incomplete character, and an empty line."""
        print_text(self._decoder.flush())
        end_text()


def _report(
    job: Run, session: Session, options: RunOptions, target: Path, drafts: list[Path]
) -> dict[str, Any]:
    """The object that --json prints."""
    facts = job.trace.runs[job.run_id]
    in_effect = facts.pick("n_ctx", "n_rs_seq", "synthetic")
    return {
        "sequences": [asdict(result) for result in job.results()],
        "options": {
            **asdict(options),
            **in_effect,
            "compute": session.compute,
            "device": str(session.device),
            "model": str(target),
            "draft_model": str(drafts[0]) if drafts else None,
            "draft_models": [str(draft) for draft in drafts],
        },
        "totals": job.summary(),
        **facts.pick("audit"),
        **(facts.pick("fork") if facts.fork else {}),
        "findings": findings_json(job.trace, job.run_id),
    }


_LONGEST_TITLE = 60


def run_turns(
    args: argparse.Namespace, options: RunOptions, target: Path, drafts: list[Path]
) -> int:
    """Run the conversation of the file; what was recorded is exported, also after an error."""
    for given, name in (
        (args.sources, "A prompt"),
        (args.report, "--report"),
        (args.markdown, "--markdown"),
    ):
        if given:
            raise OptionError(f"{name} cannot be combined with --turns.", "Leave one out.")
    cached = cache_options(args)
    recorded, has_roles, tools = read_recorded(args.turns)
    print_notes(options, has_cache=cached is not None)
    session = open_session(args, target, drafts, options)
    from engine.conversation.conversation import Conversation, Rendering
    from engine.decode.held_sequences import PromptCache

    is_chat = args.chat or (has_roles and session.chat is not None)
    rendering = Rendering(
        session, is_chat=is_chat, template_values=args.chat_template_kwargs, tools=tools
    )
    trace = TraceStore()
    conversation = Conversation(session, trace, rendering, PromptCache(cached) if cached else None)
    if not args.json:
        how = "through the model's chat template" if is_chat else "joined as plain text"
        print_lines((f"{counted(len(recorded), 'turn')}, messages {how}", ""))
    answers = args.turns_answers or "recorded"
    try:
        for number, turn in enumerate(recorded):
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
                for run_id in trace.runs:  # a signal may come before the first turn
                    TraceWriter(trace, run_id).end(["stopped"])
                export(trace, args.trace, session.content)
    turns = list(conversation.tree.turns.values())
    if args.json:
        print_json(_turns_report(turns, tools, trace, options, session, is_chat=is_chat))
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
    parent, messages, answer = turn
    given = answer if answers == "recorded" else None
    from engine.audit.run_audit import audit_of

    make = partial(audit_of, session, asked=audit, can_repeat=False)
    run = conversation.start(messages, parent, options, given, audit=make)
    if is_traced and session.content is not None:
        session.content.start(lambda: run.done or any(run.emitted))
    record(run, run.advance, None)


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
    yield f"  answer, {counted(n, 'token')}, ended by {stops[0]}: {content_of(turn.answer or {})!r}"


def turn_facts(turn: Turn) -> Iterator[str]:
    """What a turn reused, processed and saved, as lines."""
    record = turn.record
    if record is None:
        yield "no prompt cache: all of the prompt was processed"
        return
    yield reused_text(record)
    yield from processed_lines(record)
    if turn.rewritten_at is not None:
        yield (
            f"from token {turn.rewritten_at:,} on, the text so far has other tokens than were "
            "generated, because of an end token, the chat template or the tokenizer"
        )
    places = ", ".join(f"{n:,}" for n, _ in record.held)
    n_bytes = sum(size for _, size in record.held)
    line = "context checkpoints: " + (f"at {places} ({size_text(n_bytes)})" if places else "none")
    for what, found in (
        ("saved", [one.n_tokens for one in record.created]),
        ("evicted", record.evicted),
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
        f"{counted(len(records), 'turn')}: {n_all:,} prompt tokens, {n_reused:,} reused, "
        f"{n_all - n_reused:,} processed, {n_again:,} of these again; "
        f"{counted(hits, 'turn')} started from a context checkpoint"
    )


def _turns_report(
    turns: list[Turn],
    tools: list[dict[str, Any]] | None,
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
        "tools": len(tools or ()),
        "options": {**asdict(options), "compute": session.compute},
        "findings": findings_json(trace),
    }
