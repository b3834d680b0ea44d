"""`draftscope acceptance`: acceptance of a trace by position, depth, kind of text and more, or of
two laid over each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from app.cli.option_lines import refuse_given
from app.cli.output import print_report
from app.cli.rescore import opened_trace
from engine.analysis.acceptance.breakdown import (
    BY,
    CLEAR,
    INDEX,
    Breakdown,
    Group,
    TokenShare,
    breakdown,
)
from engine.analysis.acceptance.counts import Logistic
from engine.errors import OptionError
from engine.trace.run_ref import RunRef


def run(args: argparse.Namespace) -> int:
    if args.second is None:
        refuse_given(args, "a second TRACE", "--run-b")
    a = drafted_run(args.first, args.run_a, "--run-a")
    b = drafted_run(args.second, args.run_b, "--run-b") if args.second else None
    found = breakdown(a, b)
    print_report(args, asdict(found), _lines(found))
    return 0


def drafted_run(path: Path, run_id: int | None, option: str, *, or_sums: bool = False) -> RunRef:
    """The run of a file to analyse, by default the first with drafted rounds. or_sums: else one
    without rounds whose tokens are known. Raises OptionError if there is none."""
    store = opened_trace(path)
    if run_id is not None and run_id not in store.runs:
        raise OptionError(f"{path} has no run {run_id}.", f"Leave out {option}, or name another.")
    n = len(store.rounds)
    drafted = store.rounds.column("num_draft_tokens", 0, n) > 0
    known = sorted(set(store.rounds.column("run_id", 0, n)[drafted].tolist()))
    if not known and n and (store.rounds.column("num_draft_tokens", 0, n) == 0).any():
        servers = [store.runs[one].server for one in store.runs]
        why = [one for server in servers if server for one in server.launch.get("refusal", ())]
        said = f": the server refused its drafter, {'; '.join(why)}" if why else ""
        raise OptionError(
            f"No round of {path} has a draft{said}.",
            "Record it with a drafter (--spec-type) that fits the model."
            if why
            else "Record it with a drafter (--spec-type), or a longer text if it found nothing "
            "to draft.",
        )
    if or_sums and not n and len(store.tokens):
        return RunRef(store, min(store.runs) if run_id is None else run_id)
    if not known or (run_id is not None and run_id not in known):
        raise OptionError(
            f"{path} has no rounds with drafts, only totals or text without drafts.",
            "Use a recording of single rounds: `draftscope observe URL -p TEXT --trace DIR`, a "
            "llama-server log with LLAMA_TRACE=1, a record with counts per step, or a stream of "
            "SGLang with token ids.",
        )
    return RunRef(store, known[0] if run_id is None else run_id)


def _lines(found: Breakdown) -> Iterator[str]:
    yield f"{'':<24}{_heads(found.total)}"
    yield _row(found.total)
    for by in BY:
        rows = found.by(by)
        if not rows:
            continue
        yield ""
        yield f"by {by}" if by != "after" else "after a round with"
        yield from map(_row, rows)
        if by == INDEX:
            yield from _expected(rows)
        if by in found.decay:
            yield from _decay(by, found.decay[by])


def _heads(group: Group) -> str:
    one = f"{'judged':>8}{'accepted':>10}{'rate':>8}{'bounds':>15}"
    return one if group.b is None else f"{one}{one}{'p':>10}"


def _row(group: Group) -> str:
    line = f"  {group.label[:22]:<22}{_share(group.a)}"
    if group.b is None or group.p is None:
        return line
    return f"{line}{_share(group.b)}{group.p:>10.2g}{' *' if group.p < CLEAR else ''}"


def _share(share: TokenShare) -> str:
    if not share.n:
        return f"{0:>8}{'-':>10}{'-':>8}{'':>15}"
    bounds = f"{share.low:.3f}-{share.high:.3f}"
    return f"{share.n:>8}{share.accepted:>10}{share.rate:>8.3f}{bounds:>15}"


def _expected(rows: Sequence[Group]) -> Iterator[str]:
    """The rule's expected acceptance, if it samples and this is known."""
    for name, shares in (("A", [row.a for row in rows]), ("B", [row.b for row in rows])):
        known = [one.expected for one in shares if one is not None]
        if any(one is not None and 0 < one < 1 for one in known):
            said = ", ".join("-" if one is None else f"{one:.3f}" for one in known)
            yield (f"  expected for {name}, by the acceptance rule's probabilities: {said}")


def _decay(by: str, fits: tuple[Logistic | None, ...]) -> Iterator[str]:
    what = "position" if by == BY[0] else "doubling of the context"
    for name, fit in zip("AB", fits, strict=False):
        if fit is None:
            continue
        of = f"{name}: " if len(fits) > 1 else ""
        slope, error, begin, end = fit
        yield f"  {of}log odds {slope:+.3f} ± {error:.3f} per {what}, from {begin:.3f} to {end:.3f}"
