"""`draftscope run`: a session without a window."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import draft_paths, target_path
from app.cli.files import open_session
from app.cli.findings import finding_lines, findings_json
from app.cli.option_notes import print_notes
from app.cli.output import (
    end_text,
    is_coloured,
    print_json,
    print_line,
    print_lines,
    print_text,
    print_texts,
    tell,
)
from app.cli.recorded import check_trace_folder, decode
from app.cli.reports import check_report, deliver_report
from app.cli.run_arguments import PromptSource, add_arguments, run_options
from app.cli.run_turns import refuse_turns, run_turns
from app.cli.token_styles import styled
from engine.analysis.audit_text import audit_text
from engine.draft.registry import DRAFTERS
from engine.errors import OptionError
from engine.gguf.tokenizer import StreamDecoder
from engine.options import Prompt, RunOptions
from engine.report.headline import figure_lines
from engine.trace.records import EMITTED_KINDS, GHOST_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.run import Run
    from engine.session import Session

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Decode all prompts; whatever was recorded is exported, also after an error or a signal."""
    target = target_path(args)
    if args.spec_draft_model and args.spec_type is None:
        args.spec_type = tuple(draft_paths(args))
    options = run_options(args)
    drafts = draft_files(args, options)
    check_trace_folder(args.trace)
    check_report(args)
    if args.turns is not None:
        return run_turns(args, options, target, drafts)
    refuse_turns(args)
    if not args.sources:
        raise OptionError("There is no prompt.", "Give one with -p, -f, --tokens or --turns.")
    print_notes(options)
    session = open_session(args, target, drafts)
    prompts = [make_prompt(session, args, source) for source in args.sources]
    from engine.audit.run_audit import audit_of
    from engine.machine.environment import environment
    from engine.report.run import run_report

    trace = TraceStore()
    audit = audit_of(session, prompts, options, asked=args.audit)
    job = session.start(prompts, options, trace, audit=audit)
    streaming = not (args.json or args.markdown) and len(prompts) == 1
    if streaming:
        stream = _Stream(trace, session, "" if args.chat else prompts[0].text)
        decode(job, job.advance, args.trace, session.content, stream.show)
        stream.end()
    else:
        decode(job, job.advance, args.trace, session.content)
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
            stream = _Stream(trace, session, "" if args.chat else prompt.text, seq_id)
            stream.show()
            stream.end()
    print_lines(finding_lines(trace))
    if args.audit:
        for line in audit_text(trace.runs[job.run_id]):
            tell(line)
    print_lines(figure_lines(job.summary()))
    return 0


def draft_files(args: argparse.Namespace, options: RunOptions) -> list[Path]:
    """The files that draft, of those drafters that are in use. Raises OptionError for a drafter
    without its file and for a file of -md that none of them uses, and what draft_paths raises."""
    there = draft_paths(args)
    types = options.spec.types
    for name in types:
        need = DRAFTERS[name].needs
        if need and need.has_file and name not in there:
            article = "an" if need.name[:1] in "AEIOU" else "a"
            raise OptionError(f"{name} needs {article} {need.name}.", "Give one with -md.")
    for name, path in there.items() if args.spec_draft_model else ():
        if types and name not in types:
            raise OptionError(
                f"{path.name} is for {name}, and --spec-type is {','.join(types)}.",
                f"Add {name} to --spec-type, or leave out -md.",
            )
    return [there[name] for name in types if name in there]


def make_prompt(session: Session, args: argparse.Namespace, source: PromptSource) -> Prompt:
    """A prompt as the arguments give it. Raises OptionError for --chat without a template."""
    if isinstance(source, tuple):
        return Prompt(source, session.tokenizer.decode(source, special=True))
    if not args.chat:
        return session.prompt(source)
    if session.chat is None:
        raise OptionError("The model has no chat template.", "Leave out --chat.")
    messages = [{"role": "user", "content": source}]
    return session.prompt(session.chat.render(messages, **args.chat_template_kwargs))


class _Stream:
    """Prints a prompt, and its continuation as the rounds bring it; where there are colours with
    the drafts that were not accepted in place, elsewhere the text alone."""

    def __init__(self, trace: TraceStore, session: Session, prompt: str, seq_id: int = 0) -> None:
        self._tokens, self._seq_id = trace.tokens, seq_id
        self._tokenizer = session.tokenizer
        self._decoder = StreamDecoder(session.tokenizer)
        self._kinds = (*EMITTED_KINDS, *GHOST_KINDS) if is_coloured() else EMITTED_KINDS
        self._seen = 0
        print_text(prompt)

    def show(self) -> None:
        """Print what has come since the last time."""
        n = len(self._tokens)
        kinds = self._tokens.texts("kind", self._seen, n)
        ids = self._tokens.column("token_id", self._seen, n).tolist()
        sequences = self._tokens.column("seq_id", self._seen, n).tolist()
        self._seen = n
        print_texts(
            styled(self._text(token, kind), kind)
            for token, kind, seq_id in zip(ids, kinds, sequences, strict=True)
            if seq_id == self._seq_id and kind in self._kinds
        )

    def _text(self, token: int, kind: str) -> str:
        if kind in GHOST_KINDS:
            return self._tokenizer.decode((token,), special=True)
        return self._decoder.push(token)

    def end(self) -> None:
        """Print what is left of an unfinished character, and an empty line."""
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
        "findings": findings_json(job.trace),
    }
