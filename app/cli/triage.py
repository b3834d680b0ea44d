"""`draftscope triage`: two traces of the same prompts, where their texts diverge and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.common import open_session
from app.cli.option_lines import refuse_given
from app.cli.output import print_report
from app.cli.rescore import check_identity, opened_trace, rescored, runs_with_text
from engine.errors import OptionError
from engine.trace.run_ref import RunRef
from resources import DEMO_TARGET

if TYPE_CHECKING:
    from engine.observe.rescoring.triage import PartingToken, TextPair, Triage


def run(args: argparse.Namespace) -> int:
    if args.demo:
        args.rescore = DEMO_TARGET
    if args.rescore is None:
        refuse_given(args, "--rescore", "+identity", "+compute")
    else:
        check_identity(args)
    a = _chosen(args.first, args.run_a, "--run-a")
    b = _chosen(args.second, args.run_b, "--run-b")
    if args.rescore is not None:
        session = open_session(args, args.rescore)
        for one in (a, b):
            rescored(args, session, one.store, one.run_id)
    from engine.observe.rescoring.triage import DIFFERENT, UNKNOWN, triage

    found = triage(a, b)
    print_report(args, {"verdict": found.verdict, **asdict(found)}, _lines(found, a, b))
    return int(found.verdict in (DIFFERENT, UNKNOWN))


def _chosen(path: Path, run_id: int | None, option: str) -> RunRef:
    store = opened_trace(path)
    known = runs_with_text(store, path, with_tokens=False)
    if run_id is not None and run_id not in known:
        raise OptionError(
            f"{option} {run_id} has no tokens in {path}.",
            f"Name one of {', '.join(map(str, known))}.",
        )
    return RunRef(store, known[0] if run_id is None else run_id)


def _lines(found: Triage, a: RunRef, b: RunRef) -> Iterator[str]:
    yield f"verdict: {found.verdict}"
    for pair in found.pairs:
        yield f"sequences {pair.seq_a} and {pair.seq_b}: {pair.verdict}. {pair.reason}"
        yield from _sides(pair)
    for name, alone in (("first", found.alone_a), ("second", found.alone_b)):
        if alone:
            listed = ", ".join(map(str, alone))
            yield (f"only in the {name}: sequences {listed}, with prompts of this run only")


def _sides(pair: TextPair) -> Iterator[str]:
    for name, token in (("first", pair.a), ("second", pair.b)):
        if token is not None:
            yield f"  {name} at position {pair.pos}: {_token(token)}"


def _token(token: PartingToken) -> str:
    if token.token_id is None and not token.text:
        return "the end"
    shown = repr(token.text) if token.token_id is None else f"{token.token_id} {token.text!r}"
    before = "no rollback before it"
    if token.after_round is not None:
        before = f"after the rollback of round {token.after_round}"
    short = ""
    if (gap := token.short) is not None:  # shown no finer than the rounding of logits
        said = "less than 0.0001" if 0 < gap < 1e-4 else f"{gap:.2g}"
        short = f", {said} below the highest logit"
    if token.round is None:
        return f"{shown}, round not observed{short}"
    return f"{shown}, round {token.round}, {before}{short}"
