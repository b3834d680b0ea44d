"""`draftscope rescore`: the tokens of any engine's run judged by this one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.common import connect, loading_line, open_session, target_path
from app.cli.option_lines import as_type, declare, refuse_given
from app.cli.output import note, print_json, print_line, print_lines
from app.cli.recorded import check_trace_folder, export
from app.cli.run_arguments import options_from
from engine.analysis.acceptance.accept_rules import ABOUT, BLOCK, AcceptRule
from engine.analysis.findings.check import recorded
from engine.analysis.findings.observed import TEXT_CHANGED
from engine.errors import OptionError, TraceFileError
from engine.observe.server.reply import TimeLimits
from engine.plain_text import counted
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import rows_by_sequence
from engine.trace.store import TraceStore

if TYPE_CHECKING:
    from engine.analysis.acceptance.breakdown import TokenShare
    from engine.observe.rescoring.rescore import Rescored
    from engine.session import Session
    from engine.trace.facts import RescoredSequence

_SAME = 0.0005
"""Expected rates closer than this are printed as one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, rule=as_type(AcceptRule.read), rules=ABOUT)


def check_identity(args: argparse.Namespace) -> None:
    """Refuse options that only apply to a server. Raises OptionError."""
    if args.server is None:
        refuse_given(args, "--server URL", "--probe", "+connection")


def run(args: argparse.Namespace) -> int:
    target = target_path(args)
    check_identity(args)
    check_trace_folder(args.trace)
    store = opened_trace(args.source)
    run_ids = [args.run] if args.run is not None else runs_with_text(store, args.source)
    if args.run is not None and args.run not in store.runs:
        raise OptionError(
            f"{args.source} has no run {args.run}.", f"Name one from 0 to {len(store.runs) - 1}."
        )
    session = open_session(args, target)
    found = list(_all_rescored(args, session, store, run_ids))
    if args.json:
        print_json({"model": str(target), "runs": [asdict(one) for one in found]})
    else:
        for one in found:
            print_lines(lines(one))
        for finding in recorded(store):
            if finding.rule == TEXT_CHANGED and finding.run_id in run_ids:
                print_line(
                    f"{finding.severity}: {finding.rule}: {finding.message} {finding.evidence}"
                )
    if args.trace is not None:
        export(store, args.trace)
    return int(any(one.n_changed for one in found))


def opened_trace(path: Path) -> TraceStore:
    """The trace in a folder, or the contents of another engine's file."""
    from engine.observe.files.importing import import_file
    from engine.trace.reopen import find_trace, open_trace

    folder = find_trace(path)
    if folder is not None:
        return open_trace(folder)
    if path.is_dir():
        raise TraceFileError(f"{path} is not an exported trace.", "Name the folder of one.")
    store = TraceStore()
    import_file(store, path)
    return store


def runs_with_text(store: TraceStore, path: Path, *, with_tokens: bool = True) -> list[int]:
    """Runs with emitted tokens, or at least a known text."""
    found = [
        run
        for run, facts in store.runs.items()
        if rows_by_sequence(store, run, EMITTED_KINDS)
        or (not with_tokens and any(request.text for request in facts.requests or ()))
    ]
    if not found:
        raise OptionError(f"{path} has no run with tokens.", "Name a trace that has.")
    return found


def rescored(
    args: argparse.Namespace, session: Session, store: TraceStore, run_id: int
) -> Rescored:
    """Rescore one run according to the arguments. Raises like rescore."""
    from engine.observe.rescoring.identity import identify
    from engine.observe.rescoring.rescore import rescore

    server, limits = None, options_from(args, TimeLimits)
    with ExitStack() as stack:
        if args.server is not None:
            server = stack.enter_context(connect(args.server, args.api_key_env, limits)[0])
        identity = identify(session, store.runs[run_id], server, may_probe=args.probe)
    return rescore(
        session,
        store,
        run_id,
        loading_line(),
        identity=identity,
        assume_same=args.assume_same,
        rule=getattr(args, "accept_rule", None),
    )


def _all_rescored(
    args: argparse.Namespace, session: Session, store: TraceStore, run_ids: list[int]
) -> Iterator[Rescored]:
    """Rescore those runs that allow it; a note says why others do not. Raises NothingToRescoreError
    if none does."""
    from engine.observe.rescoring.rescore import NothingToRescoreError

    left = len(run_ids)
    for run_id in run_ids:
        try:
            yield rescored(args, session, store, run_id)
        except NothingToRescoreError as error:
            left -= 1
            if not left:
                raise
            note(error.message)


def lines(found: Rescored) -> Iterator[str]:
    """The result of a run, one line per sequence."""
    noise = "" if found.noise is None else (f", rounding changes gaps by up to {found.noise:.2g}")
    yield (
        f"run {found.run_id}: {counted(found.n_tokens, 'token')} re-scored, compute "
        f"{found.compute}, {found.n_first} of rank 1{noise}"
    )
    yield f"  model: {found.identity.verdict}. {found.identity.reason}"
    for sequence in found.sequences:
        yield f"  sequence {sequence.seq_id}: {'; '.join(_told(sequence))}"
    if found.acceptance:
        known = "" if found.is_rule_known else ", assumed: no other rule is named"
        yield f"  accepted by {found.rule}{known}"
    for i, share in enumerate(found.acceptance):
        if share.rate is not None:
            yield (
                f"    draft position {i}: {share.accepted} of {share.n}, {share.rate:.3f}, 95 % "
                f"interval {share.low:.3f} to {share.high:.3f}, {_expected(share, found.rule)}"
            )


def _expected(share: TokenShare, rule: str) -> str:
    if share.expected is None:
        return "expected: not known"
    if share.most is None or share.most - share.expected < _SAME:
        return f"expected {share.expected:.3f}"
    if rule == BLOCK:
        return f"expected {share.expected:.3f} or more"
    return f"expected {share.expected:.3f} to {share.most:.3f}"


def _told(sequence: RescoredSequence) -> Iterator[str]:
    if sequence.n_tokens:
        how = {True: ", temperature 0", False: ", sampled at a temperature above 0", None: ""}
        n = counted(sequence.n_tokens, "token")
        yield f"{n}{how[sequence.greedy]}, {sequence.n_first} of rank 1"
    if sequence.n_near_ties:
        yield counted(sequence.n_near_ties, "near tie")
    if sequence.n_lossy:
        yield f"{sequence.n_lossy} acceptable only by the lossy rule"
    if sequence.changed is not None:
        yield f"{sequence.n_changed} not the target's choice, first at {sequence.changed.pos}"
    yield from filter(None, (sequence.not_judged, sequence.gap))
